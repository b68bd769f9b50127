"""A batch norm that trains and its relu as one operation: as exact as torch's by fp64, computed again or not."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv import pointwise_conv
from amp_graph.passes.backends.cpu.norm import batch_norm_kernel, fuse_batch_norm_relu
from amp_graph.passes.backends.cpu.norm.batch_norm_functions import (
    norm_add_relu,
    norm_add_relu_computed_again,
    norm_add_relu_kept,
    norm_and_relu,
    norm_and_relu_computed_again,
)
from amp_graph.passes.manager import run_passes
from amp_graph.passes.memory import recompute_activations
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.memory.recompute_functions import KEY
from amp_graph.policy import Policy
from tests.layers import layers
from tests.passes.builds import no_compiler  # noqa: F401
from tests.passes.drawn import drawn
from tests.passes.graphs import assert_near, capture, differences, multiply_bf16, passes_for, run_step
from tests.passes.whole_steps import stepped
from tests.relative_error import assert_as_exact, error

pytestmark = pytest.mark.compiled

BF16, FP16 = torch.bfloat16, torch.float16
LAST, EPS = torch.channels_last, 1e-5
WITHOUT = ",skip=fuse_batch_norm_relu"
# Images, channels, height, width: around vectors (16 channels), rows at a time (4), and blocks (128 rows).
SHAPES = ((3, 5, 1, 2), (2, 16, 3, 3), (1, 33, 11, 12), (2, 64, 8, 9), (1, 130, 20, 21), (4, 15, 8, 4))


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(fuse_batch_norm_relu, "FEWEST_OF_A_BATCH_NORM", 1)
    monkeypatch.setattr(recompute_activations, "MOST_AGAIN", float("inf"))
    monkeypatch.setattr(recompute_activations, "FEWEST_AGAIN", {})


def inputs(shape, low=BF16, away=0.0, form="relu"):
    """x, what is added, running mean and variance, weight, bias; channels lie ``away`` deviations from zero."""
    x = (drawn(*shape) + away).to(low).contiguous(memory_format=LAST)
    other = [drawn(*shape, seed=8, dtype=low).contiguous(memory_format=LAST)] * (form == "sum")
    mean, var, weight, bias = (drawn(shape[1], seed=seed) for seed in range(1, 5))
    return x, *other, mean, var.square(), weight + 1, bias


def torchs(form, x, *rest):
    *other, mean, var, weight, bias, momentum, eps = rest
    out = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    out = out + other[0] if other else out
    return out if form == "alone" else F.relu(out)


OURS = {"alone": partial(norm_and_relu, relu=False), "relu": norm_and_relu, "sum": norm_add_relu}


def step(function, given, dtype=None):
    """Result, gradients of x, weight and bias, and the running statistics, for a cotangent in low precision."""
    copies = [t.clone().to(dtype or t.dtype) for t in given]
    leaves = [t.requires_grad_() for t in (*copies[:-4], *copies[-2:])]
    out = function(*copies, 0.2, EPS)
    grads = torch.autograd.grad(out, leaves, drawn(*out.shape, seed=9, dtype=given[0].dtype).to(out.dtype))
    return [out.detach(), *grads, *copies[-4:-2]]


def assert_as_exact_as_torchs(found, form, given):
    assert_as_exact(found, step(partial(torchs, form), given), step(partial(torchs, form), given, torch.float64))


CASES = [(shape, low, 0.0) for shape in SHAPES for low in (BF16, FP16)]
CASES += [((2, 20, 16, 16), FP16, away) for away in (8.0, 100.0)]  # channels far from zero keep their variance


@pytest.mark.parametrize("form", OURS)
@pytest.mark.parametrize(("shape", "low", "away"), CASES, ids=str)
def test_results_gradients_and_running_statistics_are_as_exact_as_torchs(shape, low, away, form):
    given = inputs(shape, low, away, form)
    found = step(OURS[form], given)
    assert_as_exact_as_torchs(found, form, given)
    assert found[0].is_contiguous(memory_format=LAST)


def test_control_a_wrong_epsilon_is_seen():
    given = inputs((2, 20, 16, 16))
    with pytest.raises(AssertionError):
        assert_as_exact_as_torchs(step(lambda *a: norm_and_relu(*a[:6], 3e-2), given), "relu", given)


def test_nan_and_infinity_come_through_the_relu():
    given = inputs((2, 3, 4, 4))
    given[0][0, 1, 0, 0] = float("nan")
    given[0][0, 2, 0, 0] = float("inf")
    out, other = (f(*given, 0.1, EPS).isnan() for f in (norm_and_relu, partial(torchs, "relu")))
    assert torch.equal(out, other)
    assert out[:, 1:].all()
    assert not out[:, 0].any()


def test_the_same_bits_again_and_with_several_threads():
    x, _, _, weight, bias = inputs((4, 40, 100, 40))
    out, stats = batch_norm_kernel.batch_norm_relu(x, None, None, None, weight, bias, 0.1, EPS, True)
    assert torch.equal(batch_norm_kernel.batch_norm_relu_again(x, None, weight, bias, stats, True), out)
    torch.set_num_threads(3)
    assert torch.equal(batch_norm_kernel.batch_norm_relu(x, None, None, None, weight, bias, 0.1, EPS, True)[0], out)


def test_without_gradients_and_in_one_place_they_are_torchs():
    x, mean, var, weight, bias = inputs((2, 4, 3, 3))
    with torch.no_grad():
        plain = norm_and_relu(x, None, None, weight, bias)
    assert torch.equal(plain, step(norm_and_relu, (x, mean, var, weight, bias))[0])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_and_relu(x[:1, :, :1, :1], mean, var, weight, bias)


# -- the pass ---------------------------------------------------------------------------------------------


@layers(
    lambda inplace=True, affine=True: dict(
        stem=nn.Conv2d(3, 32, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(32, affine=affine),
        conv2=nn.Conv2d(32, 32, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(32, affine=affine),
        conv3=nn.Conv2d(32, 32, 1, bias=False),
        norm3=nn.BatchNorm2d(32, affine=affine),
        conv4=nn.Conv2d(32, 32, 1, bias=False),
        relu=nn.ReLU(inplace),
        head=nn.Linear(32, 4),
    ),
    seed=0,
)
def Net(self, x):
    """A stem and a residual block; ``inplace`` as torchvision writes it."""
    x = self.relu(self.norm1(self.stem(x)))
    h = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(x)))))
    h += x
    return self.head(self.conv4(self.relu(h)).mean((2, 3)))


IMAGES = drawn(4, 3, 12, 12, seed=7)


def graphs(model, policy="bf16", without=WITHOUT):
    """The graph of a model with a pass and without, what it is given, and what fusing norms has done."""
    captured = capture(model, IMAGES)
    ours, plain = (
        captured.through(passes_for(Policy.parse(policy + skip), "cpu", eager=True)) for skip in ("", without)
    )
    done = {timed.name: timed.result for timed in ours[1]}
    return ours[0], plain[0], captured.given, done.get("fuse-batch-norm-relu")


def targets(gm):
    return [n.target for n in gm.graph.nodes]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])  # for which so few channels are not computed again
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.multiplied
def test_norms_that_train_are_fused_with_the_relu_that_alone_reads_them(inplace, policy):
    gm, plain, given, result = graphs(Net(inplace), policy)
    assert len(result.changes) == 3
    assert sum(t in (norm_add_relu, norm_add_relu_computed_again) for t in targets(gm)) == 1
    assert sum(t in (norm_and_relu, norm_and_relu_computed_again) for t in targets(gm)) == 2
    assert_near(run_step(gm, given), run_step(plain, given), 0.04)  # a sum of what was written is off by 2


@pytest.mark.parametrize("policy", ["bf16", "bf16,recompute=all", "bf16,accuracy=fast,recompute=all"])
@pytest.mark.multiplied
def test_computed_again_no_bit_changes(policy):
    ours, plain, given, _ = graphs(Net(), policy, ",skip=recompute_activations")
    for again in (norm_and_relu_computed_again, norm_add_relu_computed_again):
        assert [again in targets(gm) for gm in (ours, plain)] == [True, False]
    assert not differences(run_step(ours, given), run_step(plain, given)), "running statistics are among the inputs"


def two_sums(made):
    """Gradients of two sums in a row before a convolution: twice of the same graph, and of a gradient."""
    shape = (2, 32, 6, 6)
    leaves = [drawn(*shape, seed=k, dtype=BF16).contiguous(memory_format=LAST).requires_grad_() for k in range(3)]
    weight, bias = (drawn(32, seed=k).requires_grad_() for k in (3, 4))
    kernel = drawn(8, 32, 1, 1, seed=5, dtype=BF16).requires_grad_()
    x, y, z = leaves
    first = made(x, F.relu(z), None, None, weight, bias)
    second = made(y, first, None, None, weight, bias)
    out = computing_again(F.conv2d)(second, kernel).float().square().sum()
    wanted = [*leaves, weight, bias, kernel]
    found = [torch.autograd.grad(out, wanted, retain_graph=True) for _ in range(2)]
    by_torch = torch.autograd.grad(out, wanted, create_graph=True)
    again = torch.autograd.grad(sum(g.float().square().sum() for g in by_torch), wanted, retain_graph=True)
    return first, second, [*found[0], *found[1], *by_torch, *again]


def test_a_sum_computed_again_changes_no_bit_of_any_derivative_and_is_not_saved():
    _, _, plain = two_sums(norm_add_relu)
    first, second, found = two_sums(norm_add_relu_computed_again)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    for out in (first, second):
        assert out.grad_fn.saved_tensors[4] is None
        assert out.grad_fn.metadata[KEY].made is None, "the last to ask lets it go"
    assert any(g.float().norm() > 0 for g in found[-6:]), "control: there is a second derivative"


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_sum_that_is_kept_serves_the_one_behind_it_whoever_saves_it(hooks):
    one_each = iter([norm_add_relu_kept, norm_add_relu_computed_again])
    with hooks():
        _, _, plain = two_sums(norm_add_relu)
        first, second, found = two_sums(lambda *given: next(one_each)(*given))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert torch.equal(first.grad_fn.saved_tensors[4], first)
    assert second.grad_fn.saved_tensors[4] is None


def test_a_sum_with_what_nobody_can_compute_again_is_saved():
    x, other = (drawn(2, 32, 6, 6, seed=k, dtype=BF16).requires_grad_() for k in range(2))
    weight, bias = drawn(32, seed=3), drawn(32, seed=4)
    out = norm_add_relu_computed_again(x, other * 2, None, None, weight, bias)
    assert torch.equal(out.grad_fn.saved_tensors[4], out)


@pytest.mark.parametrize(
    ("in_step", "wanted"), [(True, {norm_and_relu, norm_add_relu, pointwise_conv}), (False, set())]
)
def test_a_whole_step_has_kernels_of_ours_whoever_compiles_it(in_step, wanted, monkeypatch):
    multiply_bf16(monkeypatch, multiplies=True)
    gm = capture(Net(), IMAGES).fresh()
    run_passes(gm, passes_for(Policy.parse("bf16"), "cpu", in_step=in_step), checked=True)
    assert {norm_and_relu, norm_add_relu, pointwise_conv} & set(targets(gm)) == wanted


LEFT = {
    "statistics": (lambda: Net().eval(), "those of the batch"),
    "no parameters": (lambda: Net(affine=False), "no weight and bias"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_says_why(name):
    model, reason = LEFT[name]
    *_, result = graphs(model())
    assert not result.changes
    assert [reason in skip.reason for skip in result.skips] == [True, True, True]


def written_meanwhile(n, other):
    total = n + other
    other.mul_(3)
    return total.relu() + other


def into_the_other(n, other):
    other += n
    return other.relu()


# Ends of residual blocks that are not what they look like, of a norm and what is added; and one that is.
SUMS = {
    "twice": lambda n, other: (n + n).relu(),
    "alpha": lambda n, other: torch.add(n, other, alpha=2).relu(),
    "written meanwhile": written_meanwhile,
    "read": lambda n, other: (total := n + other).relu() + total,
    "broadcast": lambda n, other: (n + other.mean((2, 3), keepdim=True)).relu(),
    "into the other": into_the_other,
    "behind": lambda n, other: (other + n).relu(),
}


@layers(
    lambda form: dict(
        conv=nn.Conv2d(3, 32, 1, bias=False), branch=nn.Conv2d(3, 32, 1, bias=False), norm=nn.BatchNorm2d(32), form=form
    )
)
def Sums(self, x):
    other = self.conv(x)
    return SUMS[self.form](self.norm(self.branch(x)), other)


@pytest.mark.parametrize("form", SUMS)
@pytest.mark.multiplied
def test_only_sums_that_a_relu_alone_reads_are_fused(form):
    gm, plain, given, _ = graphs(Sums(form))
    assert targets(gm).count(norm_add_relu) == (form == "behind")
    assert_near(run_step(gm, given), run_step(plain, given), 0.04)  # a sum of what was written is off by 2


@pytest.mark.multiplied
def test_small_images_keep_torchs(monkeypatch):
    monkeypatch.setattr(fuse_batch_norm_relu, "FEWEST_OF_A_BATCH_NORM", 1 << 30)
    assert "as fast" in graphs(Net())[-1].skips[0].reason


@pytest.mark.multiplied
@pytest.mark.usefixtures("no_compiler")
def test_machines_without_a_compiler_keep_torchs():
    assert "compiling for this CPU" in graphs(Net())[-1].skips[0].reason


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's import
@pytest.mark.parametrize("how", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_moves_running_statistics_and_weights_as_without(how):
    def trained(policy, how="eager"):
        fused = partial(torch.optim.SGD, lr=0.1, fused=True)
        batches = [(IMAGES,)] * 3
        last = lambda: Net().to(memory_format=LAST)  # noqa: E731
        return stepped(last, lambda out: out.square().mean(), batches, policy, fused, compile=how)

    ours, plain, exact = trained("bf16", how), trained("bf16" + WITHOUT), trained("bf16-O0").model.state_dict()
    assert torch.allclose(ours.losses, plain.losses, rtol=0.02)
    assert "batch_norm_relu_backward" in ours.text
    for name, value in plain.model.state_dict().items():
        found = ours.model.state_dict()[name]
        if "num_batches" in name:
            assert torch.equal(found, value)
        else:
            mine, other = (error(t, exact[name].double()) for t in (found, value))
            assert mine <= 1.1 * other + 0.002, name
