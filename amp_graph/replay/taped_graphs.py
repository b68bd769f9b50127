"""Forward and backward of a compiled graph, recorded by running autograd once while it is recorded.

A compiler's backward cannot be traced flat: it is code already. Before: ``run(*args)``, one autograd node of the
compiler's. After: ``TapedGraphs``, with the interface of ``FlatGraphs``: forward returns a ``Tape`` as its only saved
value, and backward runs autograd on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_graph.replay.flat_call import Backward, FlatGraphs
from amp_graph.replay.flat_graph import CannotBeFlat, Flat

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
