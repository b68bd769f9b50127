"""Operators of a flat graph that are bound once: the same values, and the same as seen from above the dispatcher."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amp_graph.passes.backends.cpu.linear.lower_linears import product_low
from amp_graph.passes.graph import direct_dispatch as module
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat.fake import make_fx

X, W, B = (torch.randn(n, generator=torch.Generator().manual_seed(1)) for n in ((6, 32), (24, 32), (24,)))


def traced():
    def function(x, w, b):
        made = torch.split(F.linear(x, w, b).bfloat16(), 12, 1)
        return made[0].add_(1), made[1].float().mean(), x.new_zeros(3, dtype=torch.int64)

    return make_fx(function, tracing_mode="fake")(X, W, B)


class Seen(TorchDispatchMode):
    """The names of what is dispatched, with its arguments that are no tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        told = ["tensor" if isinstance(a, torch.Tensor) else a for a in args]
        self.calls.append((str(func), told, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_it_does_what_forward_does():
    gm = traced()
    with Seen() as ours:
        found = direct_calls(gm)(X, W, B)
    with Seen() as theirs:
        wanted = gm.forward(X, W, B)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert ours.calls == theirs.calls
    assert len(ours.calls) > 5


def through_batch_norm(x):
    """The kernel's result is contiguous where tracing has one strided like the input: transposed, no view of it."""
    normed = F.batch_norm(x.transpose(1, 2), None, None, training=True)
    return normed.transpose(1, 2).reshape(-1, x.shape[-1])


def test_a_view_that_only_tracing_could_take_is_a_copy():
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))
    gm = make_fx(through_batch_norm, tracing_mode="fake")(x)
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # control
        gm(x)
    assert torch.equal(direct_calls(gm)(x), through_batch_norm(x))


USES = {
    "written through": lambda y, view: (view.add_(2), y)[1],
    "written through a part": lambda y, view: (view[3].add_(2), y)[1],
    "written behind": lambda y, view: (y.add_(2), view * 2)[1],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_view_that_is_written_stays_one(use):
    def function(x):
        y = x + 1
        return use(y, y.t().t().view(-1))

    gm = make_fx(function, tracing_mode="fake")(X)
    assert torch.equal(direct_calls(gm)(X), function(X))
    assert [n.target for n in gm.graph.nodes if "view" in n.name] == [torch.ops.aten.view.default]


def test_a_view_that_alone_is_written_and_read_may_be_a_copy():
    def function(x):
        return (x + 1).view(-1).add_(2)

    gm = make_fx(function, tracing_mode="fake")(X)
    assert torch.equal(direct_calls(gm)(X), function(X))
    assert [n.target for n in gm.graph.nodes if "view" in n.name] == [torch.ops.aten.reshape.default]


def test_each_overload_is_its_own():
    """A graph that calls two overloads of one operator, and constants that the graph holds."""

    def function(x):
        return x + x, x + 1, x * torch.tensor([2.0])

    gm = make_fx(function)(X[:, :1])
    assert all(map(torch.equal, direct_calls(gm)(X[:, :1]), function(X[:, :1])))


BOUND = {  # arguments of each operator that torch's own binding is called for
    "add.Tensor": [(X, X), (X, 2), (X, X, {"alpha": 3})],
    "add_.Tensor": [(X, X), (X, 2.5)],
    "addmm.default": [(B, X, W.t()), (B, X, W.t(), {"beta": 0.5, "alpha": 2})],
    "as_strided.default": [(X, [2, 3], [1, 2]), (X, [2, 3], [1, 2], 4)],
    "bmm.default": [(X.view(2, 3, 32), X.view(2, 32, 3))],
    "clone.default": [(X,), (X.view(1, 2, 3, 32), {"memory_format": torch.channels_last})],
    "contiguous.default": [(X,), (X.t(),)],
    "copy_.default": [(X, X.bfloat16()), (X, B[:1])],
    "detach.default": [(X,)],
    "expand.default": [(X, [2, 6, 32]), (B, [3, -1])],
    "mm.default": [(X, W.t())],
    "mul.Tensor": [(X, X), (X.bfloat16(), 2.0), (X.to(torch.int32), 2)],
    "permute.default": [(X, [1, 0])],
    "relu.default": [(X,)],
    "reshape.default": [(X.t(), [4, 48]), (X, [-1])],
    "select.int": [(X, 1, -2)],
    "squeeze.dim": [(B[:1], 0), (X, 0)],
    "sum.dim_IntList": [(X, [0]), (X, [0, 1], True), (X.bfloat16(), [-1], False, {"dtype": torch.float32})],
    "t.default": [(X,), (B,)],
    "transpose.int": [(X, 0, -1)],
    "unflatten.int": [(X, 1, [4, -1])],
    "unsqueeze.default": [(X, -1)],
    "view.default": [(X, [2, 3, 32]), (X, [-1])],
}


def recorded(function, given):
    """What is dispatched, with its arguments, and what is returned; of what is written and aliased, too."""
    args = [a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a for a in given]
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    with Seen() as seen:
        out = function(*args, **kwargs)
    aliased = out.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
    return seen.calls, (out.shape, out.stride(), out.storage_offset(), out.dtype, aliased), [out, args[0]]


@pytest.mark.parametrize("operator", module.BINDINGS, ids=str)
def test_a_binding_dispatches_the_operator_that_it_stands_for(operator):
    for given in BOUND[str(operator).removeprefix("aten.")]:
        ours, theirs = (recorded(f, given) for f in (module.BINDINGS[operator], operator))
        assert ours[:2] == theirs[:2]
        assert all(map(torch.equal, ours[2], theirs[2]))


def test_control_another_overload_is_seen():
    assert recorded(torch.sum, (X, [0]))[0] != recorded(torch.ops.aten.sum.default, (X,))[0]


def test_operators_of_ours_are_called_without_the_dispatcher_unless_somebody_looks(monkeypatch):
    a, b = X.bfloat16(), W.t().bfloat16()
    operator, calls = OPS.product_low.default, []
    monkeypatch.setitem(module.FUNCTIONS, str(operator), lambda *given: calls.append(given) or product_low(*given))
    gm = make_fx(lambda a, b: OPS.product_low(a, b, None))(a, b)
    calls.clear()
    run = direct_calls(gm)
    with torch.no_grad():
        assert torch.equal(run(a, b), operator(a, b, None))
        assert len(calls) == 1
        with Seen() as seen:
            run(a, b)
        assert [name for name, *_ in seen.calls] == [str(operator)]
        with torch.profiler.profile() as profile:
            run(a, b)
        assert "amp_graph::product_low" in {event.key for event in profile.key_averages()}
    run(a, b)
    assert len(calls) == 1, "with gradients the dispatcher has its say"
