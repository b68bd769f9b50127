"""Custom functions of autograd in converted models: as in eager PyTorch, in its every mode, and freed with the step."""

import copy
import gc

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture import dynamo_backend
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.graph import autograd_functions
from tests.by_hand import step_of as stepped
from tests.layers import function_of, layers

# Dynamo makes an object of each custom function that it captures.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
WIDTH = 16


class Tripled(torch.autograd.Function):
    """Results with and without gradients; a context with tensors of ``save_for_backward``, another, and a number."""

    @staticmethod
    def forward(ctx, x, factor):
        squares, above = x * x, x > -9  # all are: no number lies beside the border
        ctx.save_for_backward(x, squares)
        ctx.above, ctx.factor = above, factor
        ctx.mark_non_differentiable(above)
        return squares * x * factor, above, x + 1

    @staticmethod
    def backward(ctx, of_cubes, _, of_sums):
        _, squares = ctx.saved_tensors
        return of_cubes * squares * (3 * ctx.factor) + of_sums * ctx.above, None


Cubes = function_of(lambda x: x**3, lambda grad, x: grad * 3 * x * x)


@layers(lambda function: dict(first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH), function=function), seed=0)
def Model(self, x):
    return self.function(self, x)


def tripled(s, x):
    cubes, above, sums = Tripled.apply(s.first(x), 0.5)
    return s.second(cubes) * above + sums


def cubed(s, x):
    return Cubes.apply(s.first(x))


def models(function, policy="bf16"):
    plain = Model(function)
    return plain, amp_graph.convert(copy.deepcopy(plain), policy), torch.randn(4, WIDTH)


def near(found, wanted, within=0.02):
    return all((a - b).norm() <= within * b.norm() for a, b in zip(found, wanted, strict=True))


def test_a_function_is_called_and_computes_what_torchs_operator_does(monkeypatch):
    plain, model, x = models(tripled)
    found = stepped(model, x)
    (graph,) = conversion_of(model).graphs
    assert "custom_function" in {getattr(n.target, "__name__", "") for n in graph.rewritten.gm.graph.nodes}
    monkeypatch.setattr(dynamo_backend, "call_custom_functions", lambda gm: None)
    _, without, _ = models(tripled)
    assert all(map(torch.equal, found, stepped(without, x)))
    assert near(found, stepped(plain, x))
    assert not near([t.roll(1) for t in found], stepped(plain, x))


def left_by_a_step(function):
    """How many tensors more than before there are behind a step, where nobody collects garbage."""
    _, model, x = models(function)
    stepped(model, x), stepped(model, x)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) is torch.Tensor for o in gc.get_objects())
        stepped(model, x)
        return sum(type(o) is torch.Tensor for o in gc.get_objects()) - before
    finally:
        gc.enable()


def test_what_is_saved_goes_with_the_step():
    assert [left_by_a_step(function) for function in (tripled, cubed)] == [0, 0]


def test_control_torchs_operator_keeps_what_is_saved(monkeypatch):
    monkeypatch.setattr(dynamo_backend, "call_custom_functions", lambda gm: None)
    assert left_by_a_step(tripled) > 0


def twice(model, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [model.first.weight.grad, x.grad]


def test_second_derivatives():
    plain, model, x = models(cubed)
    wanted = twice(plain, x)
    assert near(twice(model, x), wanted)


def test_control_second_derivatives_are_lost_where_a_backward_has_no_gradients(monkeypatch):
    monkeypatch.setattr(autograd_functions, "follow_grad_mode", lambda body: None)
    _, model, x = models(cubed)
    assert twice(model, x)[1] is None


def test_several_backwards_and_gradients_at_a_time():
    plain, model, x = models(tripled)
    found, wanted = [], []
    for one, into in ((model, found), (plain, wanted)):
        out = one(x).float()
        weight, grads = one.first.weight, torch.eye(4)[:, :, None].expand(-1, -1, WIDTH).contiguous()
        into += torch.autograd.grad(out, weight, grads[0], retain_graph=True)
        into += torch.autograd.grad(out, weight, grads[1], retain_graph=True)
        into += torch.autograd.grad(out, weight, grads, is_grads_batched=True)
    assert near(found, wanted)


def written(s, x):
    rows = s.first(x) * 1
    cubes = Cubes.apply(rows)
    rows.mul_(2)
    return cubes + rows


def written_apart(s, x):
    rows = s.first(x) * 1
    return Cubes.apply(rows) + rows * 2


def test_what_was_saved_and_is_written_is_told_or_right():
    """PyTorch refuses it. The function reads a cast copy of low rows, which is not written: the gradient is right."""
    plain, model, x = models(written)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stepped(plain, x)
    apart, *_ = models(written_apart)
    assert near(stepped(model, x), stepped(apart, x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_one_that_writes_to_its_input_is_left_to_torch():
    plain, model, x = models(lambda s, x: s.second(Doubled.apply(s.first(x) * 1)))
    assert near(stepped(model, x), stepped(plain, x))


def by_einsum(grad, x, weight):
    return torch.einsum("bo,oi->bi", grad, weight), torch.einsum("bo,bi->oi", grad, x)


def by_tensordot(grad, x, weight):
    return torch.tensordot(grad, weight, ([1], [0])), torch.tensordot(grad, x, ([0], [0]))


PARTS = {
    "einsum": function_of(lambda x, weight: torch.einsum("bi,oi->bo", x, weight), by_einsum),
    "tensordot": function_of(lambda x, weight: torch.tensordot(x, weight, ([1], [1])), by_tensordot),
    "sum": function_of(lambda x, weight: (x[:, None] * weight[None]).sum(-1), by_einsum),
    "inner": function_of(torch.inner, by_einsum),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("function", PARTS.values(), ids=PARTS)
def test_products_that_autocast_knows_by_their_parts(function, policy):
    """Captured again under autocast, which casts what einsum is made of, backward met two precisions."""
    plain, model, x = models(lambda s, x: function.apply(s.first(x), s.second.weight), policy)
    assert near(stepped(model, x), stepped(plain, x))
