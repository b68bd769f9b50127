"""Copies of a group of weights that are kept between the micro-batches of an update, on devices that run behind.

Before: all weights of the group are cast at every call. After: ``GroupCopies.read(weights)`` returns the copies of the
call before, if nothing has written to any of the weights since. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from amp_graph.passes.torch_compat.cuda import stream_of
from amp_graph.passes.torch_compat.storage import address_of, storage_key
from amp_graph.passes.weights.cache_entry import KeptCopy, Signs, is_current, owns_its_memory, signs_of
from amp_graph.passes.weights.memory_access_hooks import REPLAYS
from amp_graph.passes.weights.update_tracking import DROPPED_AT_STEPS
from amp_graph.passes.weights.watched_memory import watch_of


@dataclass(frozen=True)
class _Kept:
    """Copies of one call. stream: that made them, and alone reads them. replay: the last replay of a CUDA graph."""

    copies: tuple[KeptCopy, ...]
    stream: int
    replay: object


class GroupCopies:
    """The copies of one group, from the second micro-batch of an update to the optimizer's step, which frees them.

    They are kept in calls whose weights have gradients already: later micro-batches. They are current while each
    weight's version counter, storage, address and strides are unchanged, no optimizer has stepped, no CUDA graph was
    replayed, and nobody has obtained a weight's memory otherwise. While a CUDA graph is recorded they are neither read
    nor kept: casts are recorded.
    """

    def __init__(self, check: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """``check`` is called with each weight and its copy when they are read."""
        self._check = check
        self._kept: _Kept | None = None  # replaced as a whole
        DROPPED_AT_STEPS.add(self)

    def read(self, weights: Sequence[Tensor]) -> list[Tensor] | None:
        """Return aliases of the copies, None where the weights have to be cast."""
        kept = self._kept
        if kept is None:
            return None
        if kept.stream != stream_of(weights[0]) or kept.replay is not REPLAYS.mark:
            return None
        if len(kept.copies) != len(weights) or not all(map(is_current, kept.copies, weights)):
            return None
        for copy, weight in zip(kept.copies, weights, strict=True) if self._check is not None else ():
            assert self._check is not None, "asked above"
            self._check(weight, copy.low)
        return [copy.low.detach() for copy in kept.copies]

    def signs(self, weights: Sequence[Tensor]) -> list[Signs] | None:
        """Return the weights' signs, to be read before they are cast; None where their copies are not to be kept."""
        self._kept = None  # before new ones are made
        if any(w.grad is None or not owns_its_memory(w) for w in weights) or stream_of(weights[0]) is None:
            return None
        found = [signs_of(w, watch_of(w)) for w in weights]
        return None if any(watch_of(w).why_not_free(w) for w in weights) else found

    def keep(self, weights: Sequence[Tensor], low: Sequence[Tensor], signs: Sequence[Signs]) -> None:
        """Keep ``low``, the copies of ``weights`` as they were when their ``signs`` were read."""
        stream = stream_of(weights[0])
        if stream is None:
            return
        copies = (
            KeptCopy(copy, sign, watch_of(w), storage_key(w), address_of(w), w.stride())
            for w, copy, sign in zip(weights, low, signs, strict=True)
        )
        self._kept = _Kept(tuple(copies), stream, REPLAYS.mark)

    @property
    def tensors(self) -> list[Tensor]:
        """The copies."""
        kept = self._kept
        return [] if kept is None else [copy.low for copy in kept.copies]

    def drop(self) -> None:
        """Forget the copies."""
        self._kept = None
