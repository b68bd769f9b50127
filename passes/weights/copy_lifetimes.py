"""How long low-precision copies of weights live in training: to their last reader in backward, or to the update.

Before: every copy is alive when the last gradient arrives. After: ``Lifetimes.keeps(weight, adds)``, by a plan of
what is alive when (``plan_copy_lifetimes.py``); the others are freed by ``FreesCopy``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from amp_graph.passes.memory.heap_retention import trim_heap

TRIMMED = 64 << 20

if TYPE_CHECKING:
    from amp_graph.passes.weights.cast_cache import WeightCopies


@dataclass(frozen=True)
class CopyPlan:
    """What a graph in training needs, and which copies, by number of its inputs, stay without adding to its peak.

    fresh: in a backward whose gradients are new memory. adding: in one that adds to gradients that exist.
    copies, staying: bytes of all copies, and of those in ``fresh``. gradients, saved: bytes that backward allocates,
    and that it frees: the activations that matmuls, convolutions, attention and losses save, a lower bound.
    """

    fresh: frozenset[int] = frozenset()
    adding: frozenset[int] = frozenset()
    copies: int = 0
    staying: int = 0
    gradients: int = 0
    saved: int = 0


class Lifetimes:
    """Which copies of one model outlive their last reader in backward, by the plans of all its graphs in training.

    written: an optimizer of ours writes the copies in its update, so that all of them stay. trims: whether memory goes
    back to the system; not with ``keep_memory`` or ``raise_malloc_thresholds``.
    """

    trims = True

    def __init__(self, keeps_memory: bool = False) -> None:
        self.written = False
        if keeps_memory:
            self.trims = False
        self._freed = 0  # bytes, since the heap's free pages were last returned
        self._stays: dict[int, tuple[bool, bool]] = {}  # by id of a parameter: fresh, adding

    def obey(self, plan: CopyPlan, args: Sequence[Any]) -> None:
        """Add the plan of a graph that is called with ``args``: a copy stays only where every graph lets it."""
        for i, arg in enumerate(args):
            if isinstance(arg, Parameter):
                fresh, adding = self._stays.get(id(arg), (True, True))
                self._stays[id(arg)] = fresh and i in plan.fresh, adding and i in plan.adding

    def keeps(self, weight: Tensor, adds: bool) -> bool:
        """Say whether the copy stays when all its readers have run backward; ``adds``: to a gradient that exists."""
        return self.written or self._stays.get(id(weight), (False, False))[adds]

    def was_freed(self, size: int) -> None:
        """Return the heap's free pages to the system after each ``TRIMMED`` bytes of copies.

        A copy leaves a hole that is half as large as the gradient that is allocated next, and glibc's aligned
        allocations do not fit a hole of their own size: without this, backward grows the heap by its gradients.
        """
        self._freed += size
        if self.trims and self._freed >= TRIMMED:
            self._freed = 0
            trim_heap()

    def bytes_that_stay(self, weights: Collection[Tensor]) -> int:
        """Return the bytes of the copies of ``weights`` that stay where gradients are new memory."""
        return sum(2 * w.numel() for w in weights if self.keeps(w, False))


class FreesCopy:
    """A hook of the gradient of a copy: it runs when all readers of the copy have run backward."""

    def __init__(self, copies: WeightCopies, weight: Tensor) -> None:
        self._copies = weakref.ref(copies)
        self._weight = weight

    def __call__(self, grad: Tensor) -> None:
        """Free the copy, before the parameter's gradient is allocated."""
        copies = self._copies()
        if copies is not None:
            copies.was_read_last(self._weight)
