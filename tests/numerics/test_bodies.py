"""Calibration and bisection inside of branches and loops: what overflows there is found and kept full."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.while_loop import while_loop

import amp_graph
from amp_graph.passes.graph.bodies import OPERATORS
from tests.layers import layers, linear_of
from tests.numerics.planted import SILENT, Plant

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's scan, of itself


@layers(
    lambda: dict(
        up=linear_of(2e5 * torch.eye(WIDTH), torch.zeros(WIDTH)),
        down=nn.Linear(WIDTH, WIDTH),
    )
)
def Large(self, x):
    """A layer whose products are beyond fp16, and become small again."""
    return self.down(self.up(x) * 1e-5)


@layers(lambda: dict(first=nn.Linear(WIDTH, WIDTH), large=Large(), last=nn.Linear(WIDTH, WIDTH)))
def Branch(self, x):
    (h,) = torch.cond(
        x.sum() > 1e9, lambda h: (self.first(h),), lambda h: (self.large(self.first(h)),), (torch.tanh(x),)
    )
    return self.last(h)


@layers(lambda: dict(mix=nn.Linear(WIDTH, WIDTH), large=Large(), last=nn.Linear(WIDTH, WIDTH)))
def Recurrent(self, x):
    def step(state, row):
        state = torch.tanh(self.mix(state) + self.large(row))
        return state, state * 2.0

    return self.last(scan(step, torch.zeros(WIDTH), x)[1])


@layers(lambda: dict(large=Large(), last=nn.Linear(WIDTH, WIDTH)))
def Loop(self, x):
    def body(i, h):
        return i + 1, torch.tanh(self.large(h))

    return self.last(while_loop(lambda i, h: i < 3, body, (torch.zeros((), dtype=torch.long), torch.tanh(x)))[1])


PLACES = {Branch: "large.up:cond/1/linear", Recurrent: "large.up:scan/0/linear", Loop: "large.up:while_loop/1/linear"}


def made(kind):
    torch.manual_seed(0)
    return kind(), torch.rand(5, WIDTH) + 1.0, torch.randn(5, WIDTH)


def output(kind, policy):
    model, x, _ = made(kind)
    with torch.no_grad():
        return amp_graph.convert(model, policy)(x)


@pytest.mark.filterwarnings(SILENT)
@pytest.mark.parametrize("kind", PLACES)
def test_what_overflows_inside_of_a_body_is_kept_full_and_its_gradients_are_measured(kind, tmp_path):
    model, x, y = made(kind)
    if kind is Loop:  # torch has no backward of a while_loop
        model.requires_grad_(False)
    found = amp_graph.calibrate(model, [(x, y), (x + 1, y)], F.mse_loss)
    assert PLACES[kind] in found.out_of_range()
    seen = found.values[PLACES[kind]]
    assert seen.value.batches == 2
    assert kind is Loop or seen.gradient.largest > 0
    found.save(tmp_path / "run.json")
    expected = output(kind, "O0")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not know.*")
        warnings.filterwarnings("ignore", message=".*first:cond/0/linear")  # of the branch that never ran
        calibrated = output(kind, f"fp16,calibration={tmp_path}/run.json")
    assert torch.allclose(calibrated, expected, atol=0.02, rtol=0.01)
    assert not torch.allclose(output(kind, "fp16"), expected, atol=0.02, rtol=0.01)  # fp16 as it is overflows


@pytest.mark.filterwarnings(SILENT)
@pytest.mark.parametrize("kind", [Branch, pytest.param(Recurrent, marks=pytest.mark.slow)])
def test_bisect_finds_the_operation_inside_of_a_body(kind):
    model, x, y = made(kind)
    policy = amp_graph.bisect(model, [(x, y)], F.mse_loss, policy="fp16", tolerance=0.02)
    assert PLACES[kind] in policy.kept
    assert len(policy.kept) <= 2
    assert torch.allclose(output(kind, str(policy)), output(kind, "O0"), atol=0.02, rtol=0.01)


@layers(
    lambda kind, inside: dict(
        inside=inside,
        plant=Plant(kind, WIDTH),
        first=nn.Linear(WIDTH, WIDTH),
        mix=nn.Linear(WIDTH, WIDTH),
        last=nn.Linear(WIDTH, WIDTH),
    )
)
def Planted(self, x):
    """A plant inside of a branch, of a loop, or of both."""
    h = torch.tanh(self.first(x))
    if self.inside == "cond":
        (h,) = torch.cond(x.sum() > 0, lambda h: (self.plant(self.mix(h)),), lambda h: (self.mix(h),), (h,))
        return self.last(h)

    def step(state, row):
        state = torch.tanh(self.mix(state) + row)
        if self.inside == "cond in scan":
            (out,) = torch.cond(state.sum() > 1e9, lambda s: (s * 1.0,), lambda s: (self.plant(self.mix(s)),), (state,))
            return state, out
        return state, self.plant(self.mix(state))

    return self.last(scan(step, torch.zeros(WIDTH), h)[1])


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings(SILENT)
@pytest.mark.parametrize("inside", ["cond", "scan", "cond in scan"])
@pytest.mark.parametrize(("kind", "scale"), [("forward", 1.0), ("backward", 2.0**14)])
def test_the_line_inside_of_a_body_is_named_at_first_try(kind, scale, inside):
    model, x, y = Planted(kind, inside), torch.rand(5, WIDTH) + 1.0, torch.randn(5, WIDTH)
    found = amp_graph.locate(model, (x, y), F.mse_loss, policy="fp16", scale=scale)
    assert (found.kind, found.direction, found.module) == ("overflow", kind, "plant")
    assert "x * 600.0 * 400.0" in found.line if kind == "forward" else "x * 2.0**-9" in found.line
    assert found.fix
    assert not amp_graph.locate(Planted("", inside), (x, y), F.mse_loss, policy="fp16").reached, "the control"


def test_operators_run_as_python_have_torchs_results():
    xs, w = torch.randn(4, 3), torch.randn(3)

    def step(carry, row, w):
        return carry * w + row, carry.sum()

    carried, rows = OPERATORS["scan"](step, (torch.zeros(3),), (xs,), (w,))
    expected = torch.zeros(3)
    for row in xs:
        expected = expected * w + row
    assert torch.equal(carried, expected)
    assert rows.shape == (4,)
    assert torch.equal(OPERATORS["cond"](torch.tensor(False), torch.sin, torch.cos, (xs,)), torch.cos(xs))
    counted = OPERATORS["while_loop"](lambda i, x: (i < 3,), lambda i, x: (i + 1, x * w), (0, xs))
    assert torch.equal(counted[1], xs * w * w * w)
    (mapped,) = OPERATORS["map_impl"](lambda x, w: (x * w,), (xs,), (w,))
    assert torch.equal(mapped, xs * w)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings(SILENT)
@pytest.mark.parametrize("inside", ["cond", "scan", "cond in scan"])
@pytest.mark.parametrize(("kind", "policy"), [("forward", "fp16"), ("coarse", "bf16")])
def test_what_spoils_the_result_inside_of_a_body_is_first(kind, policy, inside):
    model, x, y = Planted(kind, inside), torch.rand(5, WIDTH) + 1.0, torch.randn(5, WIDTH)
    worst, *others = amp_graph.compare(model, [(x, y), (x + 0.5, y)], F.mse_loss, policy=policy).operations
    prefix = {"cond": "plant:cond/0/", "scan": "plant:scan/0/", "cond in scan": "plant:scan/0/cond/1/"}[inside]
    assert worst.key.startswith(prefix if kind == "forward" else prefix.replace("plant:", "plant.coarse:"))
    assert worst.key.endswith("mul.1" if kind == "forward" else "linear")
    assert worst.introduced > 10 * max(one.introduced for one in others if one.key.startswith(("first", "last")))
    # torch.autocast and fp32 run the bodies as well, step for step.
    assert all(one.fp32 < 1e-3 and (one.gradient_fp32 or 0.0) < 1e-3 for one in (worst, *others))
    mix = next(one for one in others if one.key.startswith("mix:"))
    assert 1e-5 < mix.autocast < 0.01
    assert mix.error <= 1.1 * mix.autocast
