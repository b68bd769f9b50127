"""One autograd function for a whole call: a forward that has run, and a backward that somebody else knows how to run.

Before: a graph of autograd nodes, one for each operation. After: ``outputs_of(call, args)``, tensors whose gradients go
to ``call.gradients``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from amp_graph.replay.flat_graph import Flat


class Call(Protocol):
    """One call whose backward has not run yet."""

    @property
    def flat(self) -> Flat:
        """The graphs of the call."""
        ...

    def gradients(self, kept: Sequence[Tensor], given: Sequence[Tensor | None], node: Any) -> Sequence[Tensor | None]:
        """Return the gradient for each route of ``flat``.

        kept: the arguments that backward reads. given: the gradients of the outputs that have one. node: the call in
        autograd's graph.
        """
        ...


def outputs_of(call: Call, results: Sequence[Tensor], args: Sequence[Any]) -> list[Any]:
    """Return the outputs of the captured graph, from the new tensors ``results`` and its arguments."""
    flat = call.flat
    if flat.backward is None:
        return arranged(flat, results, args)
    made: Any = _Behind.apply(call, results, [args[i] for i in flat.kept], *(args[i] for i in flat.routes))
    return arranged(flat, made, args)


def arranged(flat: Flat, new: Sequence[Tensor], args: Sequence[Any]) -> list[Any]:
    """Return the outputs in the captured graph's order."""
    return [new[o.place] if o.place is not None else args[o.passed] if o.passed is not None else o.constant
            for o in flat.outputs]  # fmt: skip


class _Behind(torch.autograd.Function):
    """Connects results that exist already to the backward of their call."""

    @staticmethod
    def forward(ctx: Any, call: Call, results: Sequence[Tensor], kept: Sequence[Tensor], *edges: Tensor) -> Any:
        """Return the results."""
        differentiable = set(call.flat.with_gradient)
        ctx.call = call
        ctx.places = call.flat.with_gradient
        # Autograd checks that what it saves is not modified; statistics may be updated in the meantime.
        loose = [n for n, i in enumerate(call.flat.kept) if i in call.flat.uncounted]
        ctx.loose = {n: kept[n] for n in loose}
        ctx.save_for_backward(*(t for n, t in enumerate(kept) if n not in ctx.loose))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for place, r in enumerate(results) if place not in differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the edges."""
        given = [grads[place] for place in ctx.places]
        kept = list(ctx.saved_tensors)
        for n, tensor in ctx.loose.items():  # in order
            kept.insert(n, tensor)
        found = ctx.call.gradients(kept, given, ctx)
        return None, None, None, *found
