"""The flat graphs of one captured graph, for calls whose arguments are of one kind.

Before: a GraphModule and the arguments of a call. After: ``FlatGraphs(gm, args)``, with a flat backward for each layout
of the gradients that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def pattern_of(given: Sequence[Tensor | None]) -> Pattern:
    """Return how the gradients of outputs are laid out."""
    return tuple(None if g is None else tuple(g.stride()) for g in given)


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

    def backward(self, given: Sequence[Tensor | None]) -> tuple[Flat, Backward] | None:
        """Return a backward for gradients laid out as ``given``, on all kept arguments and saved values; None: zero."""
        pattern = pattern_of(given)
        if pattern not in self._backwards:
            with torch.set_grad_enabled(self._grad):
                found = trace_flat(self._gm, self._like, pattern, self.flat.routes)
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
