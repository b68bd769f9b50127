"""Finds the operation that returned the first value of a step that is not finite.

Before: a skipped step. After: ``aten.mm.default``, in the backward of ``train.py:42``. The largest magnitude of each
result stays on the device as a tensor of one element; the host reads them if the step was skipped. Values are followed
by their memory: what reads an infinite value hands it on, and did not make it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.audit.records import Call
from amp_graph.passes.graph.node_info import is_mutable

MOST = 50_000  # operations that are kept, the last: an evaluation in between may have many more


# A call that returned "inf" or "nan", and the largest magnitude of its inputs, NaN if unknown; of an input of the step
# that was NaN before, the text says so.
Origin = tuple[Call, str, float]
# An operation: its results by their memory, the memory of its inputs, the largest magnitudes of inputs that were not
# known, and whether the script wrote an infinite number into the call, as in masks.
Seen = tuple[Call, dict[int, Tensor], tuple[int, ...], dict[int, Tensor], bool]


class FirstOverflow:
    """The operations of one step."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque(maxlen=MOST)
        self._known: set[int] = set()

    def take(self, call: Call, operator: Any, given: Sequence[Any], result: Any) -> None:
        """Take an operation after it ran, with all of its arguments."""
        inputs = {_memory(t): t for t in _floats(given)}
        results = {_memory(t): t for t in _floats(tree_leaves(result))}
        is_view = results.keys() <= inputs.keys() and not is_mutable(operator)
        if not results or is_view:
            return
        # What was written to in place can no longer be read as it was.
        new = {m: _largest(t) for m, t in inputs.items() if m not in self._known and m not in results}
        self._known |= inputs.keys() | results.keys()
        meant = any(isinstance(one, float) and not math.isfinite(one) for one in given)
        self._seen.append((call, {memory: _largest(t) for memory, t in results.items()}, tuple(inputs), new, meant))

    def origin(self) -> Origin | None:
        """Return what made the first value that is not finite; the host waits for the device."""
        largest: dict[int, float] = {}
        spoilt: Origin | None = None
        for call, results, inputs, new, meant in self._seen:
            for memory, value in new.items():
                largest[memory] = float(value)
                if math.isnan(largest[memory]) and spoilt is None:
                    spoilt = call, "nan, which an input of the step holds", math.nan
            before = [largest.get(memory, 0.0) for memory in inputs]
            after = {memory: float(value) for memory, value in results.items()}
            bad = [value for value in after.values() if not math.isfinite(value)]
            if bad and not meant and all(map(math.isfinite, before)):
                return (call, "nan" if math.isnan(bad[0]) else "inf", max(before, default=math.nan))
            largest |= after
        return spoilt


def _floats(given: Sequence[Any]) -> Iterator[Tensor]:
    return (t for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.itemsize > 1 and t.numel())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _largest(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, math.inf).float()
