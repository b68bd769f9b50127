"""What graphs without gradients read in place of a weight copy: the copy packed, folded or cut for a kernel.

Before: ``linear(x, weight_copy(weight))``. After: ``linear_of_packed(x, packed)``, with ``packed`` kept in a store of
its kind, under the weight's id or a key of the kernel's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.weights.cache_entry import KeptCopy, is_of

PACKED, TRANSPOSED, PANELS, TRANSPOSED_PANELS, FOLDED, PARTS = STORES = range(6)
COMPARED = (PACKED, TRANSPOSED, PANELS, TRANSPOSED_PANELS)  # where packed weights are kept for copies of equal bits


class PackedCopies:
    """The packed forms of one model's weights; see prepacked_linear.py, folded_conv.py, chunked_linear.py."""

    def __init__(self) -> None:
        self.packed: tuple[dict[Any, KeptCopy], ...] = tuple({} for _ in STORES)

    def keep_packed(
        self, weight: Tensor, made_of: KeptCopy, packed: Tensor, store: int, key: Any = None, beside: Any = None
    ) -> KeptCopy:
        """Keep the packed form of a copy that ``for_packing`` returned; free that copy unless others read it."""
        made = made_of.again(packed, made_of.signs)
        made.beside = beside
        if made.signs.mark is None:
            made.held = made_of.low
        if made.held is None or store in COMPARED:
            self.packed[store][key or id(weight)] = made
        return made

    def same_as_packed(self, weight: Tensor, made_of: KeptCopy, packed: KeptCopy | None) -> bool:
        """Say whether ``packed`` has the same bits as ``made_of``, a copy of memory that may be written undetected."""
        if packed is None or packed.held is None or not is_of(packed, weight):
            return False
        return are_same(packed.held, made_of.low)

    def forget_packed(self) -> None:
        """Free all packed forms."""
        for store in self.packed:  # the very objects that graphs look into
            if store:
                store.clear()


def are_same(one: Tensor, other: Tensor) -> bool:
    """Say whether two low-precision tensors have the same bits."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))
