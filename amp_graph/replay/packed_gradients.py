"""Gradients of a recorded backward in one piece of memory for each dtype, which is handed out by one copy.

Before: a copy for each of hundreds of gradients, each of which costs the host as much as a kernel. After: the recording
ends with a copy into the piece; a replay is followed by one copy of the piece, and views of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_graph.replay.static_memory import copied

ALIGNED = 128  # bytes, as kernels that read vectors want it


@dataclass(frozen=True)
class _Place:
    """Where a gradient lies: in which result of the recording, and how; ``strides`` None: it is that result."""

    result: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    offset: int = 0


class PackedGradients:
    """The layout of a backward's gradients, which is known once it has been recorded."""

    def __init__(self) -> None:
        """Nothing is laid out yet."""
        self._places: list[_Place | None] = []
        self._packs = 0

    def pack(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the pieces, and the gradients that are in none of them: expanded ones. A part of the recording."""
        sizes: dict[torch.dtype, int] = {}
        packed = [g for g in grads if g is not None and _is_dense(g)]
        numbers = {dtype: n for n, dtype in enumerate(dict.fromkeys(g.dtype for g in packed))}
        self._places, others = [], list[Tensor]()
        for g in grads:
            if g is None:
                self._places.append(None)
            elif _is_dense(g):
                offset = sizes.get(g.dtype, 0)
                self._places.append(_Place(numbers[g.dtype], tuple(g.shape), tuple(g.stride()), offset))
                step = ALIGNED // g.element_size() or 1
                sizes[g.dtype] = offset + -(-g.numel() // step) * step
            else:
                self._places.append(_Place(len(numbers) + len(others)))
                others.append(g)
        self._packs = len(numbers)
        device = packed[0].device if packed else None
        pieces = [torch.empty(sizes[dtype], dtype=dtype, device=device) for dtype in numbers]
        if packed:
            torch._foreach_copy_([v for v in self._views(pieces) if v is not None], packed)
        return [*pieces, *others]

    def handed_out(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients, in memory of their own, from the recording's results."""
        pieces = [piece.clone() for piece in results[: self._packs]]
        views = self._views(pieces)
        for n, place in enumerate(self._places):
            if place is not None and place.strides is None:
                views[n] = copied(results[place.result])
        return views

    def _views(self, pieces: Sequence[Tensor]) -> list[Tensor | None]:
        """Return a view for each gradient that is in one of the pieces."""
        return [
            None if p is None or p.strides is None else torch.as_strided(pieces[p.result], p.shape, p.strides, p.offset)
            for p in self._places
        ]


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the elements of ``tensor`` fill their memory, in any order."""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor) and tensor.numel() > 0
