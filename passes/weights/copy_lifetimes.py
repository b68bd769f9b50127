"""How long low-precision copies of weights live in training: as long as backward reads them, or to the update.

Before: every copy is alive when the last gradient arrives. After: ``Lifetimes.keeps(weight, adds)``, by a plan of
what is alive when (``plan_copy_lifetimes.py``); autograd's saved tensors alone hold the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter


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

    written: an optimizer of ours writes the copies in its update, so that all of them stay.
    """

    def __init__(self) -> None:
        self.written = False
        self._stays: dict[int, tuple[bool, bool]] = {}  # by id of a parameter: fresh, adding

    def obey(self, plan: CopyPlan, args: Sequence[Any]) -> None:
        """Add the plan of a graph that is called with ``args``: a copy stays only where every graph lets it."""
        for i, arg in enumerate(args):
            if isinstance(arg, Parameter):
                fresh, adding = self._stays.get(id(arg), (True, True))
                self._stays[id(arg)] = fresh and i in plan.fresh, adding and i in plan.adding

    def keeps(self, weight: Tensor, adds: bool) -> bool:
        """Say whether the copy is kept for later calls; ``adds``: this backward adds to a gradient that exists."""
        return self.written or self._stays.get(id(weight), (False, False))[adds]
