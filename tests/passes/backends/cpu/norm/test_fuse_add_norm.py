"""FuseAddNorm: which sums, norms and casts become one pass, by its law, and that gradients are as exact as before."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.norm import add_norm_kernel, fuse_add_norm
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cpu.norm.add_norm_recompute import add_norm_computed_again
from amp_graph.passes.backends.cpu.norm.fuse_add_norm import FuseAddNorm
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native import jit_compiler
from amp_graph.passes.profitability import thresholds
from amp_graph.policy import Policy
from tests.passes.graphs import BF16, FP32, capture_function, passes_for, run_step

WIDTH = 16
WITHOUT = ",skip=fuse_add_norm"


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(thresholds, "FEWEST_NORMED", 1)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = drawn(6, WIDTH)
STATE = {
    "w": drawn(WIDTH, WIDTH, seed=1) / 4,
    "v": drawn(WIDTH, WIDTH, seed=2) / 4,
    "u": drawn(WIDTH, WIDTH, seed=3) / 4,
    "g": drawn(WIDTH, seed=4) + 1,
    "b": drawn(WIDTH, seed=5),
}


def norm(s, x):
    return F.layer_norm(x, (WIDTH,), s.g, s.b)


def pre_norm(s, x):
    x = torch.exp(x * s.b)
    s1 = x + norm(s, x) @ s.w
    return s1 + torch.relu(norm(s, s1) @ s.v) @ s.u


def post_norm(s, x):
    x = torch.exp(x * s.b)
    h = norm(s, torch.relu(x @ s.w) + x)
    return norm(s, h + (h @ s.v) * (h @ s.u))


def several_readers(s, x):
    x = torch.exp(x * s.b)
    h = norm(s, x)
    return x + (h @ s.w) * (h @ s.v) + h @ s.u


def parallel_norms(s, x):
    x = torch.exp(x * s.b)
    return x + norm(s, x) @ s.w + F.layer_norm(x, (WIDTH,)) @ s.v


def only_the_sum_is_low(s, x):
    return norm(s, torch.exp(x) + x.relu() @ s.w)


def both_full(s, x):
    return norm(s, torch.exp(x) + torch.exp(-x)) @ s.w


def rms_norms(s, x):
    x = torch.exp(x * s.b)
    s1 = x + F.rms_norm(x, (WIDTH,), s.g, 1e-6) @ s.w
    h = F.rms_norm(s1, (WIDTH,))
    return s1 + (h @ s.v) * (h @ s.u)


PROGRAMS = (pre_norm, post_norm, several_readers, parallel_norms, only_the_sum_is_low, both_full, rms_norms)
# How many norms become one pass, of these with a sum.
FUSED = dict(zip(PROGRAMS, ((2, 1), (2, 2), (1, 0), (2, 0), (1, 1), (1, 1), (2, 1)), strict=True))


def graphs(function, policy="bf16", x=X, **state):
    """The graph with the pass, that without, the inputs, and what the pass did."""
    captured = capture_function(function, x, **(state or STATE))
    made = []
    for skip in ("", WITHOUT):
        gm = captured.fresh()
        made.append((gm, run_passes(gm, passes_for(Policy.parse(policy + skip), "cpu", eager=True), checked=True)))
    (ours, done), (plain, _) = made
    return ours, plain, captured.given, next(t.result for t in done if t.name == "fuse-add-norm")


def calls(gm):
    return [n for n in gm.graph.nodes if n.target is add_norm]


def reasons(result):
    return [skip.reason for skip in result.skips]


def error(got, exact):
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def exact_step(function, given):
    """The program in fp64, without any rounding."""
    captured = capture_function(function, X.double(), **{k: t.double() for k, t in STATE.items()})
    wide = tuple(t.double().detach().requires_grad_(t.requires_grad) for t in given)
    return run_step(captured.gm, wide)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.compiled
def test_gradients_are_as_exact_as_before(function, policy):
    gm, plain, given, result = graphs(function, policy)
    assert (len(calls(gm)), sum(n.args[1] is not None for n in calls(gm))) == FUSED[function]
    assert len(result.changes) == len(calls(gm))
    ours, before, exact = run_step(gm, given), run_step(plain, given), exact_step(function, given)
    for mine, other, true in zip(
        ours.outputs + ours.grads, before.outputs + before.grads, exact.outputs + exact.grads, strict=True
    ):
        if true is None:
            assert mine is None
            continue
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert error(mine, true) <= 1.25 * error(other, true) + 1e-6
        assert error(mine, other) <= 2 * error(other, true) + 1e-6


@pytest.mark.compiled
def test_casts_around_norms_are_gone():
    gm, plain, _, _ = graphs(pre_norm)

    def casts(graph):
        return [n for n in graph.graph.nodes if n.op == "call_method" and n.target in ("bfloat16", "float")]

    around = [n for n in casts(plain) if any(s.name.startswith("layer_norm") for s in n.all_input_nodes)]
    assert len(around) == 2
    assert len(casts(gm)) == len(casts(plain)) - 2
    assert not [n for n in gm.graph.nodes if n.target in (F.layer_norm, torch.layer_norm)]


@pytest.mark.compiled
def test_each_reader_has_a_part_of_its_own():
    gm, _, _, _ = graphs(several_readers)
    (call,) = calls(gm)
    parts = [n for n in gm.graph.nodes if n.target is operator.getitem and n.args[0] is call]
    assert [n.meta["val"].dtype for n in parts] == [FP32, BF16, BF16, BF16]
    assert [len(n.users) for n in parts] == [1, 1, 1, 1]


@pytest.mark.compiled
def test_rewriting_again_changes_nothing():
    gm, _, _, _ = graphs(post_norm)
    done = run_passes(gm, passes_for(Policy.parse("bf16"), "cpu", eager=True), checked=True)
    assert not next(t.result for t in done if t.name == "fuse-add-norm").modified
    assert len(calls(gm)) == 2


@pytest.mark.compiled
def test_without_gradients_no_value_is_an_alias():
    with torch.no_grad():
        gm, plain, given, _ = graphs(pre_norm)
        first, second = calls(gm)
        assert [first.args[-1], second.args[-1]] == [False, True]
        for mine, other in zip(gm.forward(*given), plain.forward(*given), strict=True):
            assert error(mine, other) < 5e-3


# -- the law -----------------------------------------------------------------------------------------------------


def written_sum(s, x):
    total = torch.exp(x) + x @ s.w
    h = norm(s, total) @ s.v
    total.mul_(2)
    return h + total


def sum_in_place(s, x):
    x = torch.exp(x)
    x += x @ s.w
    return norm(s, x) @ s.v


def written_norm(s, x):
    h = norm(s, torch.exp(x) + x @ s.w)
    h.mul_(2)
    return h @ s.v


@pytest.mark.parametrize("function", [written_sum, sum_in_place, written_norm], ids=lambda f: f.__name__)
def test_what_is_written_in_place_stays(function):
    gm, plain, given, result = graphs(function)
    assert not calls(gm)
    assert reasons(result) == ["the sum or the norm is written in place"]
    assert torch.equal(gm.forward(*given)[0], plain.forward(*given)[0])


def broadcast(s, x):
    return norm(s, torch.exp(x) + (x @ s.w).sum(0, keepdim=True)) @ s.v


def scaled_sum(s, x):
    return norm(s, torch.add(torch.exp(x), x @ s.w, alpha=2)) @ s.v


def late_weights(s, x):
    total = torch.exp(x) + x @ s.w
    return F.layer_norm(total, (WIDTH,), s.g.exp(), s.b) @ s.v


@pytest.mark.parametrize("function", [broadcast, scaled_sum, late_weights], ids=lambda f: f.__name__)
@pytest.mark.compiled
def test_other_sums_stay_and_their_norms_are_fused(function):
    gm, plain, given, _ = graphs(function)
    (call,) = calls(gm)
    assert call.args[1] is None
    ours, before = run_step(gm, given), run_step(plain, given)
    for mine, other in zip(ours.grads, before.grads, strict=True):
        assert mine is other is None or error(mine, other) < 5e-3


def test_the_users_own_autocast_is_left_alone():
    def function(s, x):
        with torch.autocast("cpu", enabled=False):
            return norm(s, torch.exp(x)) @ s.w

    gm, _, _, _ = graphs(function)
    assert not calls(gm)


def test_a_norm_that_nobody_casts_is_left_alone():
    gm, _, _, result = graphs(lambda s, x: norm(s, torch.exp(x)).exp())
    assert not calls(gm)
    assert not result.skips


def test_small_ones_stay(monkeypatch):
    monkeypatch.setattr(thresholds, "FEWEST_NORMED", X.numel() + 1)
    gm, _, _, result = graphs(pre_norm)
    assert not calls(gm)
    assert reasons(result) == [f"torch's operations are as fast for (6, {WIDTH}) on cpu"] * 2


def test_without_a_compiler_the_graph_stays_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path))
    jit_compiler.load.cache_clear()
    add_norm_kernel.library.cache_clear()
    try:
        gm, plain, given, result = graphs(pre_norm)
    finally:
        jit_compiler.load.cache_clear()
        add_norm_kernel.library.cache_clear()
    assert not calls(gm)
    assert all("no-such-compiler not found" in reason for reason in reasons(result))
    assert len(result.skips) == 2
    assert torch.equal(gm.forward(*given)[0], plain.forward(*given)[0])


def test_compilers_get_torchs_operations():
    gm = capture_function(pre_norm, X, **STATE).fresh()
    done = run_passes(gm, passes_for(Policy.parse("bf16"), "cpu"), checked=True)
    assert "fuse-add-norm" not in [t.name for t in done]
    assert any(isinstance(p, FuseAddNorm) for p in passes_for(Policy.parse("bf16"), "cpu", eager=True))


def test_a_reproduction_of_autocast_keeps_torchs_norms():
    passes = passes_for(Policy.parse("bf16,lists=autocast_cpu"), "cpu", eager=True)
    assert not any(isinstance(p, FuseAddNorm) for p in passes)


def low_rms_norms(s, x):
    x = x @ s.u  # the stream is low from here on
    s1 = x + F.rms_norm(x, (WIDTH,), s.g, 1e-6) @ s.w
    h = F.rms_norm(s1, (WIDTH,))
    return s1 + (h @ s.v) * (h @ s.u)


def low_layer_norms(s, x):
    x = x @ s.u
    s1 = x + norm(s, x) @ s.w
    h = F.layer_norm(s1, (WIDTH,), s.g)
    return s1 + (h @ s.v) * (h @ s.u)


@pytest.mark.parametrize("policy", ["bf16,accuracy=fast", "fp16,accuracy=fast"])
@pytest.mark.parametrize("program", [low_rms_norms, low_layer_norms])
@pytest.mark.compiled
def test_norms_of_a_low_stream_are_one_pass_without_a_cast(program, policy):
    gm, plain, given, _ = graphs(program, policy)
    first, second = [n for n in gm.graph.nodes if n.target in (add_norm, add_norm_computed_again)]
    assert (first.args[1], second.args[1] is not None) == (None, True)
    low = Policy.parse(policy).torch_dtype("cpu")
    assert [value(n).dtype for n in (first.args[0], *second.args[:2])] == [low] * 3
    ours, before, exact = run_step(gm, given), run_step(plain, given), exact_step(program, given)
    for mine, other, true in zip(
        ours.outputs + ours.grads, before.outputs + before.grads, exact.outputs + exact.grads, strict=True
    ):
        if true is None:
            assert mine is None
            continue
        assert mine.dtype == other.dtype
        assert error(mine, true) <= 1.25 * error(other, true) + 1e-6


@pytest.mark.compiled
def test_layer_norms_of_a_low_stream_stay_torchs_without_gradients():
    with torch.no_grad():
        assert not calls(graphs(low_layer_norms, "bf16,accuracy=fast")[0])
        assert len(calls(graphs(low_rms_norms, "bf16,accuracy=fast")[0])) == 2


@pytest.mark.compiled
def test_control_a_branch_that_is_forgotten_is_seen(monkeypatch):
    monkeypatch.setattr(fuse_add_norm, "add_norm", lambda x, branch, *rest: add_norm(x, None, *rest))
    gm, plain, given, _ = graphs(post_norm)
    assert error(gm.forward(*given)[0], plain.forward(*given)[0]) > 0.1


# -- whole models ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.checkpointed = checkpointed

    def inner(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))

    def forward(self, x):
        if self.checkpointed:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


class Positions(nn.Module):
    """What makes the stream fp32, as embeddings do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(drawn(6, WIDTH, seed=7))

    def forward(self, x):
        return x + self.weight


def model(checkpointed=False):
    torch.manual_seed(0)
    blocks = [Block(checkpointed) for _ in range(3)]
    return nn.Sequential(Positions(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))


def gradients(checkpointed=False, policy=None):
    made = model(checkpointed)
    if policy:
        amp_graph.convert(made, policy)
    made(X).square().mean().backward()
    return made, [p.grad for p in made.parameters()]


def assert_as_exact(got, expected, exact):
    for mine, other, true in zip(got, expected, exact, strict=True):
        assert mine.dtype == other.dtype
        assert error(mine, true) <= 1.5 * error(other, true) + 1e-6


@pytest.mark.compiled
def test_checkpoints_are_not_crossed():
    _, plain = gradients(policy="bf16" + WITHOUT)
    made, got = gradients(True, "bf16")
    text = amp_graph.report(made).graphs[0].text
    assert text.count("add_norm(") == 4
    assert text.count("None, (16,)") == 4, "a sum is in another checkpoint than the norm behind it"
    _, exact = gradients()
    assert_as_exact(got, plain, exact)


@pytest.mark.compiled
def test_the_report_tells_norms_and_casts(tmp_path):
    made, _ = gradients(policy="bf16")
    (graph,) = amp_graph.report(made).graphs
    assert graph.text.count("add_norm(") == 4
    assert len([n for n in graph.nodes if n.ops == ("aten.layer_norm",) and n.precision == "full"]) == 4
    without, _ = gradients(policy="bf16" + WITHOUT)
    (plain,) = amp_graph.report(without).graphs
    assert graph.captured_bytes == plain.captured_bytes
    assert graph.bytes["f32"] == plain.bytes["f32"] - 4 * X.numel() * 4, "norms are not written in fp32"
    assert graph.bytes["bf16"] == plain.bytes["bf16"]
    assert not [c for c in graph.casts if c.of == "activation" and "norm" in c.source]
    amp_graph.report(made).html(tmp_path / "report.html")
    assert "add_norm" in (tmp_path / "report.html").read_text()


def trained(policy, steps=5, **options):
    made = model()
    step = amp_graph.TrainStep(made, F.cross_entropy, torch.optim.SGD(made.parameters(), lr=0.1), policy, **options)
    labels = torch.arange(6) % 4
    return step, [step(X, labels).item() for _ in range(steps)]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.compiled
def test_whole_steps_run_the_same_kernels(policy):
    step, losses = trained(policy)
    _, plain = trained(policy + WITHOUT)
    _, exact = trained(f"{policy}-O0")
    text = step.graph_text()
    assert text.count("residual_norm.default") == 4
    assert text.count("residual_norm_backward.default") == 4
    for mine, other, true in zip(losses, plain, exact, strict=True):
        assert abs(mine - true) <= abs(other - true) + 5e-3


def test_held_low_weights_are_read_as_they_are():
    _, got = gradients(policy="bf16-O2")
    _, plain = gradients(policy="bf16-O2" + WITHOUT)
    _, exact = gradients()
    assert_as_exact(got, plain, exact)
