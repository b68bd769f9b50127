"""The flat graphs of one captured graph, for calls whose arguments are of one kind.

Before: a GraphModule and the arguments of a call. After: ``FlatGraphs(gm, args)``, with a flat backward for each layout
of the gradients that arrive. A compiler's backward cannot be traced flat, as it is code already: ``TapedGraphs`` have
it recorded by running autograd once, on a ``Tape`` that forward returns as its only saved value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.torch_compat.fake import FakeTensorMode, outside_modes
from amp_graph.replay.flat_graph import CannotBeFlat, Flat, Pattern
from amp_graph.replay.trace_flat import trace_flat

Backward = Callable[..., Sequence[Tensor | None]]  # of kept arguments, saved values, gradients of outputs
Key = tuple[Any, ...]


def key_of(args: Sequence[Any]) -> Key:
    """Return what a trace depends on: sizes, strides, dtypes, devices, who has a gradient, and all numbers."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *[
        (a.shape, a.stride(), a.dtype, a.device, a.requires_grad) if isinstance(a, Tensor) else a for a in args
    ]  # fmt: skip


class FlatGraphs:
    """The flat graphs of one captured graph for arguments of one ``key_of``."""

    def __init__(self, gm: GraphModule, args: Sequence[Any]) -> None:
        """Trace forward, and backward for gradients laid out as the outputs; raises CannotBeFlat."""
        self._gm = gm
        mode = FakeTensorMode()
        with outside_modes():
            self._like = [
                mode.from_tensor(a.detach().requires_grad_(a.requires_grad)) if isinstance(a, Tensor) else a
                for a in args
            ]
        self._grad = torch.is_grad_enabled()
        self.flat = trace_flat(gm, self._like)
        self._backwards: dict[Pattern, tuple[Flat, Backward]] = {}
        if self.flat.run_backward is not None:
            self._backwards[self.flat.pattern] = (self.flat, self.flat.run_backward)

    def backward(self, given: Sequence[Tensor | None], saved: Sequence[Any]) -> tuple[Flat, Backward] | None:
        """Return the backward that is recorded, which runs on these saved values."""
        return self.unrecorded(given)

    def unrecorded(self, given: Sequence[Tensor | None]) -> tuple[Flat, Backward] | None:
        """Return a backward for gradients laid out as ``given``, on all kept arguments and saved values; None: zero."""
        pattern = tuple(None if g is None else tuple(g.stride()) for g in given)
        if pattern not in self._backwards:
            with torch.set_grad_enabled(self._grad):
                found = trace_flat(self._gm, self._like, pattern)
            if found.backward is None:
                return None
            self._backwards[pattern] = (found, self._as_first(found))
        return self._backwards[pattern]

    def _as_first(self, other: Flat) -> Backward:
        """Return the backward of ``other`` with the inputs of the first one."""
        first, run = self.flat, other.run_backward
        assert run is not None, "asked before"
        known = [*(("kept", i) for i in first.kept), *(("saved", name) for name in first.saved)]
        wanted = [*(("kept", i) for i in other.kept), *(("saved", name) for name in other.saved)]
        if not set(wanted) <= set(known):
            raise CannotBeFlat("backward for these gradients reads other values than backward for all of them")
        places, count = [known.index(one) for one in wanted], len(known)

        def backward(*given: Any) -> Sequence[Tensor | None]:
            found: Sequence[Tensor | None] = run(*(given[i] for i in places), *given[count:])
            return found

        return backward


ONCE = "a compiled backward runs once for each forward, with the same outputs each time"


class Tape:
    """Autograd's graph of one recorded forward.

    Recording a backward uses it up, as the compiler frees what it saved; the recording goes on reading that memory.
    """

    keeps: ClassVar = False  # whether backward leaves the graph as it is; for tests

    def __init__(self, outs: list[Tensor], leaves: list[Tensor]) -> None:
        """Keep the outputs that have a gradient, and the arguments in the order of the routes."""
        self.outs, self.leaves, self.is_used = outs, leaves, False

    def adopt(self, other: Tape) -> None:
        """Take over the graph of a forward that ran again."""
        self.outs, self.leaves = other.outs, other.leaves

    def gradients(self, which: Sequence[bool], seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """Run backward from those outputs that have a gradient."""
        self.is_used = True
        outs = [out for out, has_gradient in zip(self.outs, which, strict=True) if has_gradient]
        with torch.enable_grad():
            found = torch.autograd.grad(outs, self.leaves, seeds, allow_unused=True, retain_graph=self.keeps)
        return [None if g is None else g.detach() for g in found]


class TapedGraphs:
    """Forward and backward of ``run``; ``traced`` are the flat graphs of what was compiled, which are not run."""

    def __init__(self, traced: FlatGraphs, run: Callable[..., Any], args: Sequence[Any]) -> None:
        """Nothing runs yet."""
        plain = traced.flat
        self.flat: Flat = replace(plain, routes=tuple(dict.fromkeys(plain.routes)), saved=("tape",))
        self.flat.uncounted = plain.written  # a compiler's code has no writes in the middle
        self.flat.run_forward = self._forward
        self._run, self._grad = run, torch.is_grad_enabled()
        self._others = [None if isinstance(a, Tensor) else a for a in args]

    def _forward(self, *given: Tensor) -> list[Any]:
        args: list[Any] = list(self._others)
        flat = self.flat
        trained = set(flat.routes)
        with torch.set_grad_enabled(self._grad):
            for i, tensor in zip(flat.tensors, given, strict=True):
                args[i] = tensor.detach().requires_grad_(i in trained)
            results = self._run(*args)
        made = {o.place: r for o, r in zip(flat.outputs, results, strict=True) if o.place is not None}
        new = [made[place].detach() for place in range(flat.made)]
        if flat.backward is None:
            return new
        return [*new, Tape([made[place] for place in flat.with_gradient], [args[i] for i in flat.routes])]

    def backward(self, given: Sequence[Tensor | None], saved: Sequence[Any]) -> tuple[Flat, Backward] | None:
        """Return a backward for these gradients; raises CannotBeFlat if it is not the first."""
        if any(tape.is_used for tape in saved):
            raise CannotBeFlat(ONCE)
        which, count = [g is not None for g in given], len(self.flat.kept)

        def backward(*inputs: Any) -> Sequence[Tensor | None]:
            tape: Tape = inputs[count]
            return tape.gradients(which, inputs[count + 1 :])

        return (self.flat, backward) if any(which) else None

    def unrecorded(self, given: Sequence[Tensor | None]) -> tuple[Flat, Backward] | None:
        """Raise CannotBeFlat: the call has to run again."""
        raise CannotBeFlat(ONCE)
