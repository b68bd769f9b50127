"""What a user's code raises in a `TrainStep` arrives as it is; wrapped optimizers and sparse tables say what to do."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import CaptureError
from tests.by_hand import descend
from tests.capture.test_failing_conversions import state_of
from tests.layers import function_of, layers

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


class TwoArguments(Exception):
    """An error that cannot be made anew from its message."""

    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")
        self.where = where


@layers(lambda: dict(body=nn.Linear(8, 4), norm=nn.BatchNorm1d(4), error=None, calls=None))
def Raises(self, x):
    """A model that raises `error` in its forward, where it has one, after it has written into a buffer."""
    x = self.norm(self.body(x))
    if self.error is not None:
        raise self.error
    return x


def step_of(model, loss_fn=F.cross_entropy, policy="bf16", **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return amp_graph.TrainStep(model, loss_fn, optimizer, policy, **options), optimizer


ERRORS = [ValueError("bad value"), TwoArguments("bad", "there"), KeyError("k"), KeyboardInterrupt("now"), SystemExit(3)]
ERRORS += [chained := RuntimeError("outer")]
chained.__cause__ = ValueError("inner")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_error_of_the_users_code_arrives_as_it_is(where, error):
    model, draws = Raises(), torch.get_rng_state()

    def loss_fn(out, target):
        if model.error is not None:
            raise model.error
        return F.cross_entropy(out, target)

    step, optimizer = step_of(model, loss_fn if where == "loss" else F.cross_entropy)
    model.error, cause = error, error.__cause__
    before, buffers = state_of(model, optimizer), [b.clone() for b in model.buffers()]
    with pytest.raises(type(error)) as caught:
        step(X, Y)
    assert caught.value is error
    assert (caught.value.__cause__, caught.value.__context__) == (cause, None)  # none of Dynamo's errors around it
    assert state_of(model, optimizer) == before
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), draws) or where == "forward"


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"policy": "bf16-O2"}])
def test_after_an_error_the_step_goes_on(options):
    model, plain = Raises(), Raises()
    plain.load_state_dict(model.state_dict())
    step, _ = step_of(model, **options)
    other, _ = step_of(plain, **options)
    model.error = ValueError("once")
    with pytest.raises(ValueError, match="once"):
        step(X, Y)
    model.error = None
    assert [step(X, Y).item() for _ in range(3)] == [other(X, Y).item() for _ in range(3)]
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


def test_shapes_that_do_not_fit_are_the_error_that_they_are_without_us():
    step, _ = step_of(Raises())
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied \(8x9 and 8x4\)"):
        step(torch.randn(8, 9), Y)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's doing
def test_an_error_in_a_custom_backward_arrives_as_it_is():
    def raises(grad, x):
        raise ValueError("in backward")

    function = function_of(torch.clone, raises)
    step, _ = step_of(nn.Linear(8, 4), lambda out, target: F.cross_entropy(function.apply(out), target))
    with pytest.raises(Exception, match="in backward"):
        step(X, Y)


# -- sparse tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "ids"),
    [
        (lambda: nn.Embedding(10, 8, sparse=True), Y),
        (lambda: nn.Embedding(10, 8, sparse=True, padding_idx=0), Y),
        (lambda: nn.Embedding(10, 8, sparse=True, padding_idx=-1), Y),
        (lambda: nn.EmbeddingBag(10, 8, sparse=True, mode="sum", padding_idx=1), Y[None].expand(8, 8)),
    ],
)
def test_sparse_tables_are_refused_by_name(make, ids):
    model = nn.Sequential(make(), nn.Linear(8, 4))
    step, optimizer = step_of(model)
    before = state_of(model, optimizer)
    with pytest.raises(CaptureError, match=r"gradient of 0\.weight is sparse(?s:.*)fix:   sparse=False"):
        step(ids, Y)
    assert state_of(model, optimizer) == before
    model[0].weight.requires_grad_(False)  # a table that does not train has no gradient
    assert step(ids, Y).isfinite()


# -- wrapped optimizers -------------------------------------------------------------------------------


class Accelerated(torch.optim.Optimizer):
    """As accelerate's, which calls no constructor of its base class."""

    def __init__(self, optimizer, scaler=None, steps=1):
        self.optimizer, self.scaler = optimizer, scaler
        self.gradient_state = type("GradientState", (), {"num_steps": steps})()

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)


class Lookahead(torch.optim.Optimizer):
    """One that is made as torch's are, and does more than the one inside."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.slow = base, [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for group, slow in zip(self.base.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True):
                p.copy_(s.lerp_(p, 0.5))


class Plain:
    """As Lightning's, which is no optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def optimizer(self):
        return self._optimizer


def losses(model, optimizer, policy="bf16"):
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, policy)
    return [step(X, Y).item() for _ in range(3)], step


def built():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), 0.05)


def wrapped_by_accelerate(optimizer, **options):
    kind = type("AcceleratedOptimizer", (Accelerated,), {"__module__": "accelerate.optimizer"})
    return kind(optimizer, **options)


@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
def test_accelerates_optimizer_is_the_one_inside(policy):
    model, optimizer = built()
    found, step = losses(model, wrapped_by_accelerate(optimizer), policy)
    assert found == losses(*built(), policy)[0]
    assert step.optimizer is optimizer


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_itself():
    from accelerate import Accelerator

    model, optimizer = built()
    assert losses(*Accelerator(cpu=True).prepare(model, optimizer))[0] == losses(*built())[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scaler": object()}, r"scales losses(?s:.*)mixed_precision='no'"),
        ({"steps": 4}, r"4 batches(?s:.*)micro_batches=4"),
    ],
)
def test_accelerates_optimizer_that_leaves_steps_out_is_refused(options, told):
    model, optimizer = built()
    before = state_of(model, optimizer)
    with pytest.raises(CaptureError, match=told):
        losses(model, wrapped_by_accelerate(optimizer, **options))
    assert state_of(model, optimizer) == before


def test_a_wrapper_that_torch_made_runs_as_it_steps():
    (model, inner), (plain, other) = built(), built()
    found, _ = losses(model, Lookahead(inner))
    cast, optimizer = amp_graph.convert(plain, "bf16"), Lookahead(other)
    for loss in found:
        assert loss == pytest.approx(descend(optimizer, F.cross_entropy(cast(X), Y)).item(), rel=1e-5)


@pytest.mark.parametrize(("wrap", "named"), [(Accelerated, "optimizer"), (Plain, "optimizer")])
def test_other_wrappers_name_the_one_inside(wrap, named):
    model, optimizer = built()
    with pytest.raises(
        CaptureError, match=rf"wraps a AdamW(?s:.*)fix:   TrainStep\(model, loss_fn, optimizer\.{named}"
    ):
        losses(model, wrap(optimizer))


def test_an_optimizer_that_was_not_made_says_so():
    class Bare(torch.optim.Optimizer):
        def __init__(self, params):
            self.param_groups, self.state = [{"params": [*params]}], {}

        def step(self, closure=None):
            pass

    model, _ = built()
    with pytest.raises(CaptureError, match=r"super\(\).__init__"):
        losses(model, Bare(model.parameters()))
