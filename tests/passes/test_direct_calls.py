"""Operators of a flat graph that are bound once: the same values, and the same as seen from above the dispatcher."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amp_graph.passes import direct_calls as module
from amp_graph.passes.direct_calls import direct_calls
from amp_graph.passes.torch_private import dispatched, make_fx

X, W, B = (torch.randn(n, generator=torch.Generator().manual_seed(1)) for n in ((6, 32), (24, 32), (24,)))


def traced():
    def function(x, w, b):
        made = torch.split(F.linear(x, w, b).bfloat16(), 12, 1)
        return made[0].add_(1), made[1].float().mean(), x.new_zeros(3, dtype=torch.int64)

    return make_fx(function, tracing_mode="fake")(X, W, B)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_it_does_what_forward_does():
    gm = traced()
    with Seen() as ours:
        found = direct_calls(gm)(X, W, B)
    with Seen() as theirs:
        wanted = gm.forward(X, W, B)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert ours.names == theirs.names
    assert len(ours.names) > 5


def test_no_operator_is_looked_up():
    run = direct_calls(traced())
    assert "ops" not in run.__func__.__code__.co_names
    assert sum(name.endswith("_of_amp_graph") for name in run.__func__.__code__.co_names) > 5
    assert "ops" in traced().forward.__func__.__code__.co_names, "control"


def test_each_overload_is_its_own():
    """A graph that calls two overloads of one operator, and constants that the graph holds."""

    def function(x):
        return x + x, x + 1, x * torch.tensor([2.0])

    gm = make_fx(function)(X[:, :1])
    assert all(map(torch.equal, direct_calls(gm)(X[:, :1]), function(X[:, :1])))


def test_what_is_no_overload_stays():
    assert dispatched(F.relu) is F.relu
    assert module.CALL.findall("torch.ops.aten.mm.default(a); torch.float32; x.ops.a.b.c(1)") == ["aten.mm.default"]
