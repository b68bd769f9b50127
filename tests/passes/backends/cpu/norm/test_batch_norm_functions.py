"""A batch norm that trains and its relu as one operation: as exact as torch's by fp64, computed again or not."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv import pointwise_conv
from amp_graph.passes.backends.cpu.norm import batch_norm_kernel, fuse_batch_norm_relu
from amp_graph.passes.backends.cpu.norm.batch_norm_functions import (
    norm_add_relu,
    norm_add_relu_computed_again,
    norm_add_relu_kept,
    norm_and_relu,
    norm_and_relu_computed_again,
)
from amp_graph.passes.backends.cpu.norm.batch_norm_kernel import OPS
from amp_graph.passes.manager import run_passes
from amp_graph.passes.memory import recompute_activations
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.memory.recompute_functions import KEY
from amp_graph.policy import Policy
from tests.by_hand import descend
from tests.layers import layers
from tests.passes.builds import no_compiler  # noqa: F401
from tests.passes.drawn import differentiated, drawn
from tests.passes.graphs import assert_near, capture, differences, multiply_bf16, passes_for, run_step
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


def inputs(shape, low=BF16, away=0.0):
    """x, running mean and variance, weight, bias; channels lie ``away`` deviations from zero."""
    x = (drawn(*shape) + away).to(low).contiguous(memory_format=LAST)
    channels = shape[1]
    return (
        x,
        drawn(channels, seed=1),
        drawn(channels, seed=2).square(),
        drawn(channels, seed=3) + 1,
        drawn(channels, seed=4),
    )


def torchs(x, mean, var, weight, bias, momentum, eps, relu):
    out = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return F.relu(out) if relu else out


def step(function, given, relu=True, dtype=None, momentum=0.2):
    """Result, gradients of x, weight and bias, and the running statistics, for a cotangent in low precision."""
    cotangent = drawn(*given[0].shape, seed=9, dtype=given[0].dtype)
    copies = [t.clone().to(dtype or t.dtype) for t in given]
    leaves = [copies[i].requires_grad_() for i in (0, 3, 4)]
    out = function(*copies, momentum, EPS, relu)
    grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
    return [out.detach(), *grads, *copies[1:3]]


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_gradients_and_running_statistics_are_as_exact_as_torchs(shape, low, relu):
    given = inputs(shape, low)
    mine, other = step(norm_and_relu, given, relu), step(torchs, given, relu)
    assert_as_exact(mine, other, step(torchs, given, relu, torch.float64))
    assert mine[0].is_contiguous(memory_format=LAST)


def sum_step(function, given, dtype=None):
    """Result, and gradients of x, what is added, weight and bias."""
    x, *_, weight, bias = given
    other = drawn(*x.shape, seed=8, dtype=x.dtype).contiguous(memory_format=LAST)
    called = lambda x, other, *affine: function(x, other, None, None, *affine, 0.1, EPS)  # noqa: E731
    return differentiated(called, (x, other, weight, bias), dtype, seed=9, like=x.dtype)


def torchs_sum(x, other, mean, var, weight, bias, momentum, eps):
    return F.relu(F.batch_norm(x, mean, var, weight, bias, True, momentum, eps) + other)


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_behind_the_norm_is_as_exact_as_torchs(shape, low):
    given = inputs(shape, low)
    assert_as_exact(
        sum_step(norm_add_relu, given), sum_step(torchs_sum, given), sum_step(torchs_sum, given, torch.float64)
    )


@pytest.mark.parametrize("away", [8.0, 100.0])
def test_channels_far_from_zero_keep_their_variance(away):
    given = inputs((2, 20, 16, 16), FP16, away)
    assert_as_exact(step(norm_and_relu, given), step(torchs, given), step(torchs, given, dtype=torch.float64))


def test_control_a_wrong_epsilon_is_seen():
    given = inputs((2, 20, 16, 16))
    wrong = step(lambda *a: norm_and_relu(*a[:6], 3e-2, a[7]), given)
    with pytest.raises(AssertionError):
        assert_as_exact(wrong, step(torchs, given), step(torchs, given, dtype=torch.float64))


def test_nan_and_infinity_come_through_the_relu():
    given = inputs((2, 3, 4, 4))
    given[0][0, 1, 0, 0] = float("nan")
    given[0][0, 2, 0, 0] = float("inf")
    out, other = (f(*given, 0.1, EPS, True).isnan() for f in (norm_and_relu, torchs))
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


def test_the_operators_fakes_are_truthful():
    x, mean, var, weight, bias = inputs((2, 4, 3, 3))
    _, stats = batch_norm_kernel.batch_norm_relu(x, None, None, None, weight, bias, 0.1, EPS, True)
    for other in (None, x):
        torch.library.opcheck(OPS.batch_norm_relu.default, (x, other, mean, var, weight, bias, 0.1, EPS, True))
        torch.library.opcheck(OPS.batch_norm_relu_again.default, (x, other, weight, bias, stats, True))
        for wants_x in (True, False):
            given = (x, x, other, weight, bias, stats, True, wants_x)
            torch.library.opcheck(OPS.batch_norm_relu_backward.default, given)


# -- the pass ---------------------------------------------------------------------------------------------


@layers(
    lambda inplace=True, channels=32: dict(
        stem=nn.Conv2d(3, channels, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(channels),
        conv2=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(channels),
        conv3=nn.Conv2d(channels, channels, 1, bias=False),
        norm3=nn.BatchNorm2d(channels),
        conv4=nn.Conv2d(channels, channels, 1, bias=False),
        relu=nn.ReLU(inplace),
        head=nn.Linear(channels, 4),
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


def made(inplace=True):
    return Net(inplace)


def graphs(model, policy="bf16", images=IMAGES):
    captured = capture(model, images)
    found = []
    for skip in ("", WITHOUT):
        gm = captured.fresh()
        found.append((gm, run_passes(gm, passes_for(Policy.parse(policy + skip), "cpu", eager=True), checked=True)))
    (ours, done), (plain, _) = found
    return ours, plain, captured.given, next((t.result for t in done if t.name == "fuse-batch-norm-relu"), None)


def targets(gm):
    return [n.target for n in gm.graph.nodes]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])  # for which so few channels are not computed again
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.multiplied
def test_norms_that_train_are_fused_with_the_relu_that_alone_reads_them(inplace, policy):
    gm, plain, given, result = graphs(made(inplace), policy)
    assert len(result.changes) == 3
    assert sum(t in (norm_add_relu, norm_add_relu_computed_again) for t in targets(gm)) == 1
    assert sum(t in (norm_and_relu, norm_and_relu_computed_again) for t in targets(gm)) == 2
    assert_near(run_step(gm, given), run_step(plain, given), 0.04)  # a sum of what was written is off by 2


@pytest.mark.parametrize("policy", ["bf16", "bf16,recompute=all", "bf16,accuracy=fast,recompute=all"])
@pytest.mark.multiplied
def test_computed_again_no_bit_changes(policy):
    captured = capture(made(), IMAGES)
    steps = []
    for skip in ("", ",skip=recompute_activations"):
        gm = captured.fresh()
        run_passes(gm, passes_for(Policy.parse(policy + skip), "cpu", eager=True), checked=True)
        steps.append(run_step(gm, captured.given))
        assert (norm_and_relu_computed_again in targets(gm)) is (skip == "")
        assert (norm_add_relu_computed_again in targets(gm)) is (skip == "")
    assert not differences(*steps), "running statistics are among the inputs"


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
    gm = capture(made(), IMAGES).fresh()
    run_passes(gm, passes_for(Policy.parse("bf16"), "cpu", in_step=in_step), checked=True)
    assert {norm_and_relu, norm_add_relu, pointwise_conv} & set(targets(gm)) == wanted


def left_alone():
    yield "statistics", made().eval(), "those of the batch"
    model = made()
    model.norm1, model.norm2, model.norm3 = (nn.BatchNorm2d(32, affine=False) for _ in range(3))
    yield "no parameters", model, "no weight and bias"


@pytest.mark.parametrize(("model", "reason"), [pytest.param(m, r, id=name) for name, m, r in left_alone()])
def test_what_is_left_alone_says_why(model, reason):
    *_, result = graphs(model)
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
    assert "as fast" in graphs(made())[-1].skips[0].reason


@pytest.mark.multiplied
@pytest.mark.usefixtures("no_compiler")
def test_machines_without_a_compiler_keep_torchs():
    assert "compiling for this CPU" in graphs(made())[-1].skips[0].reason


def trained(policy, how):
    """Losses of three steps, the state after them and the text of the step's graph: "convert", or a whole step."""
    model = made().to(memory_format=LAST)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    loss = lambda out: out.square().mean()  # noqa: E731
    if how != "convert":
        step = amp_graph.TrainStep(model, loss, optimizer, policy, compile=how)
        losses = [float(step(IMAGES)) for _ in range(3)]
        return losses, dict(model.state_dict()), step.graph_text()
    amp_graph.convert(model, policy)
    losses = []
    for _ in range(3):
        losses.append(descend(optimizer, loss(model(IMAGES))))
    return [float(one.detach()) for one in losses], dict(model.state_dict()), ""


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's import
@pytest.mark.parametrize("how", ["convert", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_moves_running_statistics_and_weights_as_without(how):
    losses, state, text = trained("bf16", how)
    others = how.replace("inductor", "eager")
    plain_losses, plain, _ = trained("bf16" + WITHOUT, others)
    _, exact, _ = trained("bf16-O0", others)
    assert torch.allclose(torch.tensor(losses), torch.tensor(plain_losses), rtol=0.02)
    assert ("batch_norm_relu_backward" in text) is (how != "convert")
    for name, value in plain.items():
        if "num_batches" in name:
            assert torch.equal(state[name], value)
        else:
            mine, other = (error(t, exact[name].double()) for t in (state[name], value))
            assert mine <= 1.1 * other + 0.002, name
