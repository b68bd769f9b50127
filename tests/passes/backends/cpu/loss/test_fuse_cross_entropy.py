"""The pass that takes a language model's loss from low-precision logits: where it applies, and that it is exact."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.loss import fuse_cross_entropy
from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low
from amp_graph.passes.backends.cpu.loss.fuse_cross_entropy import FuseCrossEntropy
from amp_graph.passes.manager import run_passes
from tests.layers import layers, words_and_head
from tests.passes.backends.cpu.loss.test_cross_entropy_functions import CLASSES
from tests.passes.drawn import drawn
from tests.passes.graphs import (
    BF16,
    capture_function,
    differences,
    options,
    run_step,
    standard_passes,
    with_and_without,
)
from tests.relative_error import error

WIDTH = 16


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    monkeypatch.setattr(fuse_cross_entropy, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(fuse_cross_entropy, "FEWEST_LOGITS", 1)


X, W = drawn(3, 12, WIDTH, seed=5), drawn(CLASSES, WIDTH, seed=6) / 2
IDS = torch.randint(CLASSES, (3, 12), generator=torch.Generator().manual_seed(7))
IDS[0, :5] = -100


def head(s, x):
    return F.linear(x.sin(), s.w)


def hugging_face(s, x, items=None):
    """``ForCausalLMLoss`` of transformers: labels are shifted, not the logits."""
    logits = head(s, x)
    labels = F.pad(s.ids, (0, 1), value=-100)[..., 1:].contiguous()
    wide = logits.float().view(-1, CLASSES)
    loss = F.cross_entropy(wide, labels.view(-1), ignore_index=-100, reduction="sum" if items else "mean")
    return loss / items if items else loss, logits


def shifted(s, x):
    """The older form, which cuts the logits."""
    cut = head(s, x).float()[..., :-1, :].contiguous()
    return F.cross_entropy(cut.view(-1, CLASSES), s.ids[..., 1:].reshape(-1))


FIRST = int(IDS.clamp(min=0).view(-1)[0])


def two_on_the_same_logits(s, x):
    wide = head(s, x).float().view(-1, CLASSES)
    return F.cross_entropy(wide, s.ids.view(-1)) + F.cross_entropy(wide, s.ids.roll(1, 1).view(-1)), wide


def of_an_index_each(s, x):
    """Identities are shared by calls that differ in numbers alone: the numbers may not be."""
    return tuple(
        F.cross_entropy(head(s, c * x).view(-1, CLASSES), s.ids.clamp(min=0).view(-1), ignore_index=i)
        for c, i in ((1, -100), (2, FIRST))
    )


FOUND = {
    "two losses on the same logits": two_on_the_same_logits,
    "each loss ignores its own index": of_an_index_each,
    "nanogpt": lambda s, x: (h := head(s, x), F.cross_entropy(h.view(-1, h.size(-1)), s.ids.view(-1))),
    "the loss alone": lambda s, x: F.cross_entropy(head(s, x).flatten(0, 1), s.ids.flatten()),
    "two dimensions": lambda s, x: F.cross_entropy(head(s, x[0]), s.ids[0]),
    "hugging face": hugging_face,
    "hugging face, a number of items": lambda s, x: hugging_face(s, x, 29),
    "without reduction": lambda s, x: F.cross_entropy(head(s, x).view(-1, CLASSES), s.ids.view(-1), reduction="none"),
    "the view is returned": lambda s, x: (v := head(s, x).view(-1, CLASSES), F.cross_entropy(v, s.ids.view(-1)), v + 1),
}


def passed(function, x=X):
    graph = capture_function(function, x, w=W, ids=IDS, c=drawn(CLASSES, seed=8))
    return with_and_without(FuseCrossEntropy(options()), graph, behind=standard_passes())


def close(a, b):
    return a is b is None or error(a, b) < 1e-4 or not (a.any() or b.any())


@pytest.mark.parametrize("name", FOUND)
def test_the_pass(name):
    plain, found, given, result = passed(FOUND[name])
    assert [c.action for c in result.changes] == ["in parts"] * (1 + ("each" in name))
    assert sum(n.target is F.cross_entropy for n in found.graph.nodes) == ("same logits" in name)
    a, b = run_step(found, given), run_step(plain, given)
    assert [t.dtype for t in a.outputs] == [t.dtype for t in b.outputs]
    assert all(map(close, a.outputs + a.grads, b.outputs + b.grads))
    (again,) = run_passes(found, [FuseCrossEntropy(options())], checked=True)
    assert not again.result.changes


LEFT = {
    "in a checkpoint": lambda s, x: torch.utils.checkpoint.checkpoint(
        lambda x: FOUND["the loss alone"](s, x), x, use_reentrant=False
    ),
    "in the user's autocast": torch.autocast("cpu", BF16)(FOUND["the loss alone"]),
    "written in place": lambda s, x: F.cross_entropy(head(s, x).view(-1, CLASSES).mul_(2), s.ids.view(-1)),
    "labels that are chances": lambda s, x: F.cross_entropy(head(s, x)[0], s.c.softmax(0).expand(12, CLASSES)),
    "weighted": lambda s, x: F.cross_entropy(head(s, x).view(-1, CLASSES), s.ids.view(-1), s.c.detach().abs()),
    "smoothed": lambda s, x: F.cross_entropy(head(s, x).view(-1, CLASSES), s.ids.view(-1), label_smoothing=0.1),
    "shifted": shifted,
    "read before": lambda s, x: (
        (h := head(s, x).float()).exp().sum() + F.cross_entropy(h.view(-1, CLASSES), s.ids.view(-1))
    ),
    "images": lambda s, x: F.cross_entropy(head(s, x).transpose(1, 2), s.ids),
    "full precision": lambda s, x: F.cross_entropy((x * s.w[0]).exp().view(-1, WIDTH), s.ids.view(-1) % WIDTH),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    plain, found, given, result = passed(LEFT[name])
    assert not result.changes
    assert result.skips or name in ("full precision", "shifted", "in a checkpoint", "in the user's autocast")
    assert not differences(run_step(found, given), run_step(plain, given))


def test_small_logits_are_left_alone(monkeypatch):
    monkeypatch.setattr(fuse_cross_entropy, "FEWEST_LOGITS", 36 * CLASSES + 1)
    assert "as fast" in passed(FOUND["nanogpt"])[3].skips[0].reason


@pytest.mark.parametrize("name", ["nanogpt", "the loss alone"])
def test_half_of_what_is_kept_of_the_logits_goes(name):
    def saved(gm, given):
        seen = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
            kept = gm(*given)
        return sum(t.numel() * t.itemsize for t in seen.values() if t.numel() == 36 * CLASSES), kept

    plain, found, given, _ = passed(FOUND[name])
    assert saved(plain, given)[0] == 36 * CLASSES * 4
    assert saved(found, given)[0] == 36 * CLASSES * 2


@layers(lambda: words_and_head(CLASSES, WIDTH, bias=True), seed=0)
def Words(self, ids):
    logits = self.head(self.words(ids).sin())
    return F.cross_entropy(logits.view(-1, CLASSES), ids.roll(1, 1).view(-1)), logits


def grads(model, context=torch.enable_grad):
    ids = IDS.clamp(min=0)
    with context():
        loss = model(ids)[0]
    (3 * loss).backward()
    return [p.grad.double() for p in model.parameters()]


def test_gradients_are_as_exact_as_autocasts():
    exact = grads(Words().double())
    theirs = grads(Words(), lambda: torch.autocast("cpu", BF16))
    converted = grads(amp_graph.convert(Words(), "bf16"))
    assert all(error(a, e) <= 1.1 * error(b, e) for a, b, e in zip(converted, theirs, exact, strict=True))


@pytest.mark.parametrize(
    ("policy", "compile", "trains", "count"),
    [
        ("bf16", "eager", True, 1),
        ("bf16", "eager", False, 0),
        ("bf16,skip=fuse_cross_entropy", "eager", True, 0),
        ("bf16,lists=autocast_cpu", "eager", True, 0),
        ("fp16", "eager", True, 0),
        ("bf16,accuracy=fast", "eager", True, 1),
        ("bf16,planner=paint", "eager", True, 1),
        ("bf16,keep_outputs=false", "eager", True, 1),
        ("bf16-O2", "eager", True, 1),
        ("bf16", "aot_eager", True, 0),
    ],
)
def test_where_it_runs(policy, compile, trains, count):
    model = amp_graph.convert(Words(), policy, compile=compile)
    with torch.set_grad_enabled(trains):
        model(IDS.clamp(min=0))
    (graph,) = conversion_of(model).graphs
    found = [n for n in graph.rewritten.gm.graph.nodes if n.target in (cross_entropy_low, cross_entropy_and_logits)]
    assert len(found) == count
    assert "cross_entropy_loss" in amp_graph.report(model).text()


def test_lengths_that_change_are_one_graph():
    model = amp_graph.convert(Words(), "bf16", dynamic=True)
    plain = amp_graph.convert(Words(), "bf16,skip=fuse-cross-entropy", dynamic=True)
    for length in (12, 7, 9):
        ids = IDS[:, :length].clamp(min=0)
        assert all(map(close, model(ids), plain(ids)))
    (graph,) = conversion_of(model).graphs
    assert any(n.target is cross_entropy_and_logits for n in graph.rewritten.gm.graph.nodes)
