"""A linear whose input does not lie in rows is one product, and gives what it gave."""

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.layout.contiguous_linear_input import ContiguousLinearInput
from tests.passes.graphs import Function, assert_left_alone, capture_function, with_and_without

X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(16, 8, generator=torch.Generator().manual_seed(2)) / 3
B = torch.randn(16, generator=torch.Generator().manual_seed(3))


def batched_products(run, *args):
    """How many products by the element of a batch are made."""
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run(*args)
    return sum(e.name == "aten::bmm" for e in seen.events())


def passed(function, x=X, grad=False, frozen=True):
    with torch.set_grad_enabled(grad):
        graph = capture_function(function, x, w=W, b=B)
        if frozen:
            graph.gm.requires_grad_(False)
        return with_and_without(ContiguousLinearInput(), graph)


FLATTENED = {
    "linear": lambda s, x: F.linear(x.transpose(0, 1), s.w, s.b),
    "without bias": lambda s, x: F.linear(x.transpose(0, 1), s.w),
    "matmul": lambda s, x: x.transpose(0, 1) @ s.w.t(),
    "four dimensions": lambda s, x: F.linear(x.view(2, 3, 5, 8).transpose(1, 2), s.w, s.b),
    "a part": lambda s, x: F.linear(x.transpose(0, 1)[:, 1:4], s.w),
}


def _in_a_region(s, x):
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.transpose(0, 1), s.w, s.b)


KEPT = {
    "in the user's region": _in_a_region,
    "in rows": lambda s, x: F.linear(x, s.w, s.b),
    "every second row": lambda s, x: F.linear(x[:, ::2][:, :1], s.w, s.b),
    "the last token": lambda s, x: F.linear(x[:, -1:], s.w, s.b),
    "a matrix": lambda s, x: F.linear(x[0].t().t(), s.w, s.b),
    "a batch of matrices": lambda s, x: x.transpose(0, 1) @ s.w.t().expand(5, 8, 16),
}


@pytest.mark.parametrize("name", FLATTENED)
def test_one_product_and_the_same_numbers(name):
    plain, ours, given, result = passed(FLATTENED[name])
    assert len(result.changes) == 1
    assert batched_products(plain, *given) >= 1  # the control: so it was
    assert batched_products(ours, *given) == 0
    with torch.no_grad():
        got, before = ours(*given)[0], plain(*given)[0]
        exact = Function(FLATTENED[name], w=W, b=B).double()(X.double())
    assert got.shape == before.shape
    assert got.stride() == before.stride()
    assert got.dtype == before.dtype
    assert (got - exact).norm() <= 1.05 * (before - exact).norm()


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name):
    assert_left_alone(passed(KEPT[name]))


@pytest.mark.parametrize("name", ["without bias", "matmul"])
def test_with_gradients_torch_folds_by_itself(name):
    _, _, _, result = passed(FLATTENED[name], X.clone().requires_grad_(), grad=True, frozen=False)
    assert not result.changes


def operations(run, given):
    """The names of what a forward executes, its output, and the gradients of what it is given."""
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out = run(*given)[0]
    generator = torch.Generator().manual_seed(4)
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator, dtype=out.dtype))
    return {e.name for e in seen.events()}, [out.detach(), *grads]


@pytest.mark.parametrize("name", ["linear", "four dimensions"])
def test_with_gradients_the_product_begins_with_the_bias(name):
    plain, ours, given, result = passed(FLATTENED[name], X.clone().requires_grad_(), grad=True, frozen=False)
    assert len(result.changes) == 1
    (before, theirs), (after, found) = operations(plain, given), operations(ours, given)
    assert ("aten::addmm" in before, "aten::addmm" in after) == (False, True)
    doubled = [t.detach().double().requires_grad_() for t in given]
    captured = capture_function(FLATTENED[name], X.clone().requires_grad_(), w=W, b=B)
    _, exact = operations(captured.gm.forward, doubled)
    for one, other, true in zip(found, theirs, exact, strict=True):
        assert one.stride() == other.stride()
        assert (one - true).norm() <= 1.05 * (other - true).norm() + 1e-12


def test_two_readers_share_the_copy():
    function = lambda s, x: F.linear(h := x.transpose(0, 1), s.w, s.b) + F.linear(h, s.w)  # noqa: E731
    _, ours, _, result = passed(function)
    assert len(result.changes) == 2
    assert sum(n.target == "contiguous" for n in ours.graph.nodes) == 1
