"""Frozen models: weights cast, packed and folded once; every write that torch shows is read at the next call."""

import copy
import functools
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, CaptureError
from tests.by_hand import descend
from tests.copied import WAYS
from tests.layers import layers
from tests.warned import heard, warnings_are_errors, without_warnings

X = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(1))


@layers(
    lambda: dict(
        conv=nn.Conv2d(16, 64, 3, padding=1),
        norm=nn.BatchNorm2d(64),
        first=nn.Linear(1024, 256),
        last=nn.Linear(256, 10),
    )
)
def Net(self, x):
    h = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
    return self.last(torch.relu(self.first(h.flatten(1))))


def built():
    torch.manual_seed(0)
    return amp_graph.convert(Net().eval(), "bf16", strict=True)


@functools.cache
def reference():
    return built()


def fresh(model):
    """What a model that is frozen now gives."""
    reference().load_state_dict(model.state_dict())
    with amp_graph.frozen(reference()):
        return run(reference())


@torch.no_grad()
def run(model):
    return model(X)


def stepped(optimizer, **options):
    def write(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer(model.parameters(), lr=0.1, **options).step()

    return write


@torch.no_grad()
def averaged(model):
    theirs = Net().state_dict()
    for name, p in model.named_parameters():
        p.lerp_(theirs[name], 0.5)


@torch.no_grad()
def moved(model):
    model.double().float()
    model.last.bias.add_(1)


def norm_trained(model):
    model.norm.train()
    model.norm(torch.randn(4, 64, 3, 3))
    model.norm.eval()


def fused(model):
    model.first.weight.grad = torch.ones(256, 1024)
    torch.optim.SGD([model.first.weight], lr=0.1, fused=True).step()


unrecorded = torch.no_grad()
SEEN = {
    "copy_": unrecorded(lambda m: m.first.weight.copy_(torch.randn(256, 1024))),
    "add_": unrecorded(lambda m: m.conv.weight.add_(1)),
    "mul_ of a bias": unrecorded(lambda m: m.first.bias.mul_(3)),
    "an element": unrecorded(lambda m: m.last.weight[0].fill_(1)),
    "a view": unrecorded(lambda m: m.first.weight.view(-1)[5:100_000].zero_()),
    "init": lambda m: nn.init.normal_(m.last.weight),
    "detach": lambda m: m.last.weight.detach().add_(1),
    "data assigned": lambda m: setattr(m.first.weight, "data", torch.randn(256, 1024)),
    "SGD": stepped(torch.optim.SGD),
    "AdamW": stepped(torch.optim.AdamW),
    "AdamW, foreach": stepped(torch.optim.AdamW, foreach=True),
    "load_state_dict": lambda m: m.load_state_dict(Net().state_dict()),
    "load_state_dict, assign": lambda m: m.load_state_dict(Net().state_dict(), assign=True),
    "another Parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.randn(256, 1024))),
    "another module": lambda m: setattr(m, "last", nn.Linear(256, 10)),
    "adapters merged": unrecorded(lambda m: m.first.weight.add_(torch.randn(256, 4) @ torch.randn(4, 1024) / 10)),
    "moving average": averaged,
    "clipping": unrecorded(lambda m: m.first.weight.clamp_(-0.01, 0.01)),
    "dtypes": moved,
    "running statistics": norm_trained,
    "norm's weight": unrecorded(lambda m: m.norm.weight.mul_(2)),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()).detach() + 0.1, m.parameters()
    ),
    "set_": unrecorded(lambda m: m.first.weight.set_(torch.randn(256, 1024))),
}
# Writes that leave the version counter, which the docstring of freeze names.
UNSEEN = {
    "data": lambda m: m.first.weight.data.add_(1),
    "numpy": lambda m: m.first.weight.detach().numpy().__iadd__(1),
    "fused": fused,
}


@pytest.mark.parametrize("name", SEEN)
def test_a_write_that_torch_shows_is_read_at_the_next_call_and_named(name):
    write = SEEN[name]
    model = amp_graph.freeze(built())
    before = run(model)
    write(model)
    with heard() as told:
        after = run(model)
    assert torch.equal(after, fresh(model))
    assert not torch.equal(after, before)
    shown = [str(w.message) for w in told if issubclass(w.category, AmpGraphWarning)]
    if name not in ("another module", "running statistics", "norm's weight"):  # captured anew, or read in fp32
        assert any("were written or replaced" in text for text in shown)
    with warnings_are_errors(Warning):
        assert torch.equal(run(model), after)


@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
def test_control_the_documented_writes_are_not_seen_and_thaw_and_freeze_read_them(write):
    model = amp_graph.freeze(built())
    before = run(model)
    write(model)
    assert torch.equal(run(model), before)
    assert torch.equal(run(amp_graph.freeze(amp_graph.thaw(model))), fresh(model))
    assert "through ``.data`` or\n    numpy, by torch's fused optimizers" in amp_graph.freeze.__doc__


def test_a_frozen_model_casts_no_weight_and_is_as_exact():
    model = built()
    exact = copy.deepcopy(amp_graph.revert(copy.deepcopy(model))).double()
    plain = run(model)
    amp_graph.freeze(model)
    (first, second), reference = (run(model), run(model)), exact(X.double())
    assert torch.equal(first, second)
    assert (first - reference).abs().max() <= 1.5 * (plain - reference).abs().max() + 1e-3
    (graph,) = conversion_of(model).graphs
    assert not [n for n in graph.rewritten.gm.graph.nodes if n.target == "bfloat16" and n.args[0].op == "get_attr"]
    assert "frozen: weights are cast, packed and folded once" in amp_graph.report(model).text()


def test_the_report_of_a_model_that_is_not_frozen_says_the_line_that_brings_the_rest():
    model = built()
    run(model)
    assert "amp_graph.freeze(model)" in amp_graph.report(model).text()
    assert conversion_of(model).captured.frozen is None


def test_a_frozen_model_refuses_gradients_and_names_the_way_back():
    model = amp_graph.freeze(built())
    for call in (lambda: model(X), lambda: model.train()(X)):
        with pytest.raises(CaptureError, match=r"(?s)frozen: it computes no gradients.*amp_graph\.thaw\(model\)"):
            call()
    with pytest.raises(CaptureError, match=r"frozen for inference\n  fix:   amp_graph\.thaw"):
        amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters(), 0.1))
    amp_graph.thaw(model)(X).sum().backward()
    assert model.conv.weight.grad is not None


def test_an_evaluation_in_the_middle_of_training_captures_once_and_reads_every_update():
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    captured = set()
    for _ in range(3):
        descend(optimizer, model.train()(X).square().mean())
        model.eval()
        with amp_graph.frozen(model):
            assert torch.equal(run(model), fresh(model))
            captured.add(id(conversion_of(model)))
            assert len(conversion_of(model).graphs) == 1
        assert conversion_of(model).captured.frozen is None
        assert conversion_of(model).frozen.captured.frozen.bytes == 0
    assert len(captured) == 1


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_the_block_restores_what_was_before(ends):
    model = amp_graph.freeze(built())
    with amp_graph.frozen(model):
        pass
    assert isinstance(conversion_of(model), type(conversion_of(amp_graph.freeze(model))))
    plain = conversion_of(amp_graph.thaw(model))
    try:
        with amp_graph.frozen(model):
            assert conversion_of(model) is not plain
            if ends == "raises":
                raise KeyError
    except KeyError:
        pass
    assert conversion_of(model) is plain


@pytest.mark.parametrize("again", WAYS)
def test_copies_are_frozen_and_apart(again):
    model = amp_graph.freeze(built())
    other = again(model)
    assert list(other.state_dict()) == list(Net().state_dict())
    assert torch.equal(run(other), run(model))
    with torch.no_grad():
        model.first.weight.zero_()
    with pytest.warns(AmpGraphWarning, match=r"first\.weight"):
        assert not torch.equal(run(model), run(other))
    amp_graph.thaw(other)(X).sum().backward()


def test_revert_undoes_both_and_names_refusals():
    model = amp_graph.revert(amp_graph.freeze(built()))
    assert conversion_of(model) is None
    assert "forward" not in vars(model)
    for call in (amp_graph.freeze, amp_graph.thaw):
        with pytest.raises(CaptureError, match="is not converted"):
            call(model)
    with pytest.raises(CaptureError, match="compiled by 'inductor'"):
        amp_graph.freeze(amp_graph.convert(model, compile="inductor"))


def test_functional_call_reads_what_it_is_given_and_keeps_none_of_it():
    model = amp_graph.freeze(built())
    before = run(model)
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with torch.no_grad(), without_warnings(Warning):
        assert not torch.equal(torch.func.functional_call(model, given, (X,)), before)
        assert torch.equal(run(model), before)
    assert len(conversion_of(model).captured.frozen.tensors) <= 12


WRITES_ITS_WEIGHTS = """
import torch, amp_graph, warnings
from torch import nn
import torch.nn.functional as F
warnings.simplefilter("ignore")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x):
        {line}
        return self.q(x) + self.k(x)

torch.manual_seed(0)
model, x = Net(), torch.randn(8, 64)
ours, plain = amp_graph.convert(model, "bf16"), Net()
plain.load_state_dict(model.state_dict())
for _ in range(2):
    a, b = ours(x), plain(x)
    assert (a - b).abs().max() < 0.1, (a - b).abs().max()
    a.sum().backward(), b.sum().backward()
for (name, p), other in zip(ours.named_parameters(), plain.parameters()):
    assert torch.equal(p, other), name
    assert p.grad is None or (p.grad - other.grad).abs().max() <= 0.05 * other.grad.abs().max(), name
assert torch.equal(ours.seen, plain.seen)
"""
FIRST_IN_A_FORK = """
import os, sys, traceback, torch._dynamo, amp_graph
for script in sys.argv[1:]:
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(script, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
FORWARDS = {
    "MoCo": "self.k.weight.data = self.k.weight.data * 0.9 + self.q.weight.data * 0.1",
    "BYOL": "self.k.weight.data.mul_(0.9).add_(self.q.weight.data, alpha=0.1)",
    "clipping": "self.q.weight.data = self.q.weight.data.clamp(-0.05, 0.05)",
    "binarised": "self.q.weight.data = self.q.weight.data.sign() * 0.1",
    "normalised": "self.q.weight.data = F.normalize(self.q.weight.data, dim=1)",
    "a buffer's data": "self.seen.data = self.seen.data + 1",
    "set_": "self.seen.set_(self.seen + 1)",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks of a process that has captured nothing")
def test_the_first_model_of_a_process_writes_its_weights_in_its_forward():
    scripts = [WRITES_ITS_WEIGHTS.replace("{line}", line) for line in FORWARDS.values()]
    command = [sys.executable, "-c", FIRST_IN_A_FORK, *scripts, "assert False"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert dict(zip([*FORWARDS, "control"], done.stdout.split(), strict=True)) == {
        **dict.fromkeys(FORWARDS, "0"),
        "control": "1",
    }, done.stderr[-4000:]


# -- without fp32 weights ---------------------------------------------------------------------------------


def held_bytes(model):
    kept = conversion_of(model).captured.frozen
    return sum(p.nbytes for p in model.parameters()) + (0 if kept is None else kept.bytes)


def freed():
    return amp_graph.freeze(built(), keep_fp32_weights=False)


def test_freed_weights_save_memory_and_give_what_kept_ones_give():
    kept, model = amp_graph.freeze(built()), freed()
    wanted, found = run(kept), run(model)
    assert (found - wanted).abs().max() < 0.01 * wanted.abs().max()
    assert torch.equal(run(model), found)
    full = sum(p.nbytes for p in kept.parameters())
    assert held_bytes(model) <= held_bytes(kept) - 0.49 * full
    assert model.norm.weight.dtype is torch.float32
    names = [name for name, p in model.named_parameters() if p.dtype is torch.float32]
    assert all(name.startswith("norm") for name in names), names


LOADED = {
    "state_dict": lambda model: (model.load_state_dict(model.state_dict()), model)[1],
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "to": lambda model: model.to("cpu"),
    "freeze again": lambda model: amp_graph.freeze(model, keep_fp32_weights=False),
}


@pytest.mark.parametrize("way", LOADED)
def test_a_freed_model_is_saved_copied_and_moved(way):
    model = freed()
    wanted = run(model)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    found = LOADED[way](model)
    with without_warnings():
        assert torch.equal(run(found), wanted)
    with pytest.raises(CaptureError, match="computes no gradients"):
        found(X)


@pytest.mark.parametrize("write", ["a checkpoint", "a merge"])
def test_what_is_written_to_freed_weights_is_read(write):
    model, other = freed(), Net().eval()
    run(model)
    if write == "a checkpoint":
        model.load_state_dict(other.state_dict())
    else:
        with torch.no_grad():
            model.last.weight += 1.0
        other.load_state_dict(model.state_dict())
    exact = other(X).detach()
    with without_warnings():
        assert (run(model) - exact).abs().max() < 0.02 * exact.abs().max()


def test_a_freed_model_thaws_with_a_warning_and_one_that_may_train_keeps_its_weights():
    model = freed()
    with pytest.warns(AmpGraphWarning, match=r"freed: it trains at level O2 from rounded ones\n.*revert"):
        amp_graph.thaw(model)
    model.train()(X).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    model = built().train()
    with pytest.raises(CaptureError, match="is in training mode"):
        amp_graph.freeze(model, keep_fp32_weights=False)
    assert model.last.weight.dtype is torch.float32
    trained = amp_graph.convert(Net().train(), "bf16-O2").eval()
    with pytest.raises(CaptureError, match="has fp32 masters"):
        amp_graph.freeze(trained, keep_fp32_weights=False)
