"""Values that are computed again in backward: the same bits, less that is saved, and second derivatives."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_graph.passes.manager import run_passes
from amp_graph.passes.memory import recompute_activations, recompute_functions
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.memory.recomputable_ops import gelu_computed_again
from amp_graph.passes.memory.recompute_activations import RecomputeActivations, is_seen
from amp_graph.passes.memory.recompute_functions import KEY
from amp_graph.policy import Policy
from tests.layers import layers
from tests.passes.graphs import (
    capture,
    capture_function,
    differences,
    options,
    passes_for,
    run_step,
    standard_passes,
    with_and_without,
)

AUTOCAST, FAST = "bf16", "bf16,accuracy=fast"
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(320, 8, generator=torch.Generator().manual_seed(2)) / 3
V = torch.randn(320, 320, generator=torch.Generator().manual_seed(3)) / 9
B = torch.randn(320, generator=torch.Generator().manual_seed(4))
G = torch.rand(8, generator=torch.Generator().manual_seed(5)) + 0.5
H = torch.randn(8, generator=torch.Generator().manual_seed(6))
K = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(8)) / 9
ROWS, WIDE = 30, 320


@pytest.mark.parametrize(("device", "in_step", "words", "count"), [
    ("cpu", False, "", 1), ("cuda", False, "", 0), ("cuda", True, "", 1), ("cuda", False, ",recompute=all", 1),
])  # fmt: skip
def test_on_a_gpu_calls_from_python_are_seen(device, in_step, words, count, monkeypatch):
    """GELUs of 9,600 elements are saved there, unless the graph is a whole step's, or all are asked for."""
    monkeypatch.setattr(recompute_activations, "MOST_AGAIN", math.inf)
    passes = passes_for(Policy.parse(AUTOCAST + words), device, eager=True, in_step=in_step)
    (one,) = (p for p in passes if isinstance(p, RecomputeActivations))
    graph = capture_function(lambda s, x: F.linear(F.gelu(F.linear(x, s.w)), s.v), X, w=W, v=V)
    gm, _ = graph.through(standard_passes(AUTOCAST))
    (done,) = run_passes(gm, [one], checked=True)
    assert len(done.result.changes) == count


SIZES = {  # kind, multiplications an element is read for, elements; and whether that is seen in a step's time
    "a relu of the demo's ResNet": ("relu", 144, 131_072, True),
    "a tanh GELU of its GPT-2": ("gelu by tanh", 96, 196_608, True),
    "a GELU of 24 tokens, BERT of width 256": ("gelu", 256, 24_576, False),
    "a norm of a ViT": ("layer norm", 1152, 302_592, False),
    "a GELU of a ViT": ("gelu", 384, 1_210_368, False),
    "a relu of ResNet-50, first stage": ("relu", 576, 802_816, False),
    "what a pool alone reads, of no size": ("relu", math.inf, 4_096, True),
    "what a pool alone reads": ("relu", math.inf, 262_144, False),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_seen_is_saved(name):
    *given, seen = SIZES[name]
    assert is_seen(*given) is seen


def norm(s, x):
    return F.layer_norm(x, (8,), s.g, s.h)


def three_readers(s, x):
    h = norm(s, x * 2)
    return F.linear(h, s.w) + F.linear(h, s.w.flip(0)) * F.linear(h, s.w) + h.sum()


# Each with the accuracy it is captured for, and the bytes that need not be saved.
RECOMPUTED = {
    "gelu": (AUTOCAST, ROWS * WIDE * 2, lambda s, x: F.linear(F.gelu(F.linear(x, s.w)), s.v, s.b)),
    "gelu, fast": (FAST, ROWS * WIDE * 2, lambda s, x: F.linear(F.gelu(F.linear(x, s.w)), s.v, s.b)),
    "silu": (AUTOCAST, ROWS * WIDE * 2, lambda s, x: F.linear(F.silu(F.linear(x, s.w)), s.v)),
    "gelu by tanh": (FAST, ROWS * WIDE * 2, lambda s, x: F.linear(F.gelu(F.linear(x, s.w), approximate="tanh"), s.v)),
    "conv1d of gpt2": (
        AUTOCAST,
        ROWS * WIDE * 2,
        lambda s, x: torch.addmm(s.b, F.gelu(F.linear(x, s.w)).view(-1, WIDE), s.v.t()).view(6, 5, WIDE),
    ),
    "a slice": (AUTOCAST, ROWS * WIDE * 2, lambda s, x: F.linear(F.gelu(F.linear(x, s.w))[1:], s.v)),
    "norm in full": (FAST, ROWS * 8 * 2, lambda s, x: F.linear(norm(s, x * 2), s.w)),
    "norm in low": (FAST, ROWS * 8 * 2, lambda s, x: F.linear(norm(s, F.linear(x, s.w[:8])), s.w)),
    "norm, three readers": (FAST, ROWS * 8 * 2, three_readers),
}


def in_autocast(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(F.gelu(F.linear(x, s.w)), s.v)


def returned(s, x):
    h = F.gelu(F.linear(x, s.w))
    return F.linear(h, s.v), h


def unsummed(s, x):
    h = F.batch_norm(F.conv2d(x.view(2, 8, 3, 5), s.k, padding=1), None, None, s.g, s.h, True)
    return F.conv2d(F.relu(h) * 2, s.k), F.conv2d(h, s.k)


def without_parameters(s, x):
    h = F.batch_norm(F.conv2d(x.view(2, 8, 3, 5), s.k, padding=1), None, None, None, None, True)
    return F.conv2d(F.relu(h), s.k)


KEPT = {
    "a relu of what is read too": (FAST, unsummed),
    "a relu of a norm without parameters": (FAST, without_parameters),
    "inside the user's autocast": (FAST, in_autocast),
    "a reader that saves it": (FAST, lambda s, x: F.linear(h := F.gelu(F.linear(x, s.w)), s.v).sum() * h),
    "returned": (FAST, returned),
    "relu of a linear, which saves its result": (FAST, lambda s, x: F.linear(F.relu(F.linear(x, s.w)), s.v)),
    "written later": (FAST, lambda s, x: F.linear(F.gelu(F.linear(x, s.w)).mul_(2), s.v)),
}


def both(graph, policy):
    """Return the graph without and with the pass, and what the pass did."""
    one = RecomputeActivations(options(f"{policy},recompute=all"))
    plain, ours, _, result = with_and_without(one, graph, behind=standard_passes(policy))
    assert not run_passes(ours, [one], checked=True)[0].result.changes
    return plain, ours, result.changes


def captured(function):
    return capture_function(function, X, w=W, v=V, b=B, g=G, h=H, k=K)


def saved(run, given):
    """Return the bytes of activations that are saved: what somebody holds, and the inputs do not."""
    known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
    seen = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known and not t.shape == W.shape[::-1]:
            seen.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run(*given)
    return sum(t.untyped_storage().nbytes() for t in seen.values()), out


@pytest.mark.parametrize("name", RECOMPUTED)
def test_no_bit_changes_and_one_tensor_less_is_saved(name):
    policy, less, function = RECOMPUTED[name]
    graph = captured(function)
    plain, ours, changes = both(graph, policy)
    assert len(changes) == 1
    assert not differences(run_step(ours, graph.given), run_step(plain, graph.given))
    assert saved(plain, graph.given)[0] - saved(ours, graph.given)[0] == less


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name):
    policy, function = KEPT[name]
    graph = captured(function)
    plain, ours, changes = both(graph, policy)
    assert not changes
    assert not differences(run_step(ours, graph.given), run_step(plain, graph.given))


# -- images -----------------------------------------------------------------------------------------------


@layers(
    lambda inplace=True: dict(
        inplace=inplace,
        conv1=nn.Conv2d(16, 16, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(16),
        conv2=nn.Conv2d(16, 16, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(16),
    )
)
def Block(self, x):
    """A residual block; ``inplace`` as torchvision writes it."""
    h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), self.inplace)))
    if self.inplace:
        h += x
        return F.relu(h, inplace=True)
    return (h + x).relu()


def residual(blocks=3, inplace=True):
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.MaxPool2d(2)]
    parts = [*stem, *(Block(inplace) for _ in range(blocks))]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(16, 4))


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(7))
IMAGE = 2 * 16 * 8 * 8 * 2  # bytes of an image behind the pool


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", [AUTOCAST, FAST])
def test_norms_with_relus_are_computed_again_and_statistics_move_once(policy, training, inplace):
    """The first block adds what a pool returns, which nobody computes again; the pool's choices take 2 bytes, not 8."""
    graph = capture(residual(inplace=inplace).train(training), IMAGES)
    plain, ours, changes = both(graph, policy)
    a, b = run_step(ours, graph.given), run_step(plain, graph.given)
    assert len(changes) == 6
    assert not differences(a, b), "running statistics are among the inputs"
    assert any(not torch.equal(x, y) for x, y in zip(a.inputs, graph.given, strict=True)) is training
    assert saved(plain, graph.given)[0] - saved(ours, graph.given)[0] == (4 + 5 + 3) * IMAGE


def test_blocks_are_computed_from_each_other_up_to_the_longest(monkeypatch):
    monkeypatch.setattr(recompute_activations, "LONGEST", 2)
    graph = capture(residual(5), IMAGES)
    plain, ours, changes = both(graph, FAST)
    assert len(changes) == 1 + 5 + 3, "the stem, inner ones, of the blocks two, then one behind one that is kept"
    assert not differences(run_step(ours, graph.given), run_step(plain, graph.given))


# -- controls, and what may happen around a backward ------------------------------------------------------


WRONG = {
    "GeluBackward0": lambda node, _: F.gelu(node._saved_self, approximate="tanh"),
    "NativeBatchNormBackward0": lambda node, _: torch.zeros_like(node._saved_input),
    "_LowLayerNormBackward": lambda node, _: torch.zeros_like(node.saved_tensors[0]),
    "AddBackward0": lambda node, _: recompute_functions.value_of(node.next_functions[0][0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_control_another_value_is_seen(name, monkeypatch):
    graphs = {"GeluBackward0": RECOMPUTED["gelu"][2], "_LowLayerNormBackward": RECOMPUTED["norm in low"][2]}
    graph = captured(graphs[name]) if name in graphs else capture(residual(), IMAGES)
    plain, ours, _ = both(graph, FAST)
    monkeypatch.setitem(recompute_functions.COMPUTE, name, WRONG[name])
    assert differences(run_step(ours, graph.given), run_step(plain, graph.given))


def gradients(graph, run, work):
    """Return what ``work`` makes of the output, and of the inputs that train."""
    given = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in graph.given
    ]
    (out,) = run(*given)
    return work(out, [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad])


def twice(out, leaves):
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    return [*first, *torch.autograd.grad(out.sum(), leaves)]


def of_second_order(out, leaves):
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


def in_an_autocast_region(out, leaves):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(out.sum(), leaves)


def a_part_first(out, leaves):
    return [*torch.autograd.grad(out.sum(), leaves[-1], retain_graph=True), *torch.autograd.grad(out.sum(), leaves)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("work", [twice, of_second_order, in_an_autocast_region, a_part_first])
@pytest.mark.parametrize("model", ["mlp", "images", "norm"])
def test_gradients_are_those_of_the_graph_without(model, work):
    graphs = {"mlp": RECOMPUTED["gelu"][2], "norm": RECOMPUTED["norm in full"][2]}
    graph = captured(graphs[model]) if model in graphs else capture(residual(), IMAGES)
    plain, ours, changes = both(graph, FAST)
    assert changes
    results = [gradients(graph, run.forward, work) for run in (ours, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_backward_and_a_write_are_refused_as_ever():
    x = torch.randn(4, 8, requires_grad=True)
    linear, w = computing_again(F.linear), torch.randn(8, 8, requires_grad=True)
    a = x * 1
    out = linear(gelu_computed_again(a), w)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    for written in (a := x * 1, w):
        out = linear(gelu_computed_again(a), w)
        with torch.no_grad():
            written.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_other_hooks_save_what_is_left_to_save():
    """A checkpoint, or a copy to another memory, must hold all that is held, and be asked for it."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    packed, asked = [], []

    def pack(t):
        packed.append(t)
        return t

    def unpack(t):
        asked.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = computing_again(F.linear)(gelu_computed_again(a := x * 1), w)
    assert {t.data_ptr() for t in packed} == {a.data_ptr(), w.data_ptr()}
    out.sum().backward()
    assert len(asked) == len(packed), "each once: what is saved for a checkpoint is given out once"


def test_nothing_is_held_by_a_cycle():
    graph = capture(residual(), IMAGES)
    _, ours, _ = both(graph, FAST)
    gc.collect()
    gc.disable()
    try:
        (out,) = ours(*graph.given)
        node = out.grad_fn
        while not node.name().startswith("Relu"):
            node = node.next_functions[1 if node.name() == "AddmmBackward0" else 0][0]
        held = weakref.ref(node.metadata[KEY])
        del node
        assert held() is not None
        out.sum().backward()
        del out
        assert held() is None
    finally:
        gc.enable()


def test_without_gradients_and_in_transforms_nothing_is_marked():
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    linear = computing_again(F.linear)

    def loss(x):
        return linear(gelu_computed_again(x), w).sum()

    assert loss(x).grad_fn is None
    expected = torch.func.grad(lambda x: F.linear(F.gelu(x), w).sum())(x)
    assert torch.equal(torch.func.grad(loss)(x), expected)
