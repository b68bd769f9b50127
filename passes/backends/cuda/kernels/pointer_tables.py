"""Tables of addresses in a device's memory, by which one Triton kernel reads and writes many tensors.

Before: a launch per tensor, or a copy of addresses from the host at each step. After: a table that is kept, of which
only the addresses that have moved are written, by kernels whose arguments they are. No copy from the host: nothing
waits, and a CUDA graph records it.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

MOST_TABLES = 64  # kept in a process; one is some 30 KB for 300 tensors
_tables: OrderedDict[Hashable, Table] = OrderedDict()
_lock = threading.Lock()


class Table:
    """Integers in a device's memory; they start as zeros."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate it."""
        self.words = [0] * size
        with torch.inference_mode(False):
            self.tensor = torch.zeros(size, dtype=torch.int64, device=device)
            self._views = self.tensor.unbind()

    def write(self, words: Sequence[int]) -> None:
        """Write the ``words`` that have changed: each grows by a difference, one kernel for some hundred of them."""
        if words == self.words:
            return
        pairs = enumerate(zip(self.words, words, strict=True))
        moved = {i: _wrapped(new - old) for i, (old, new) in pairs if new != old}
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_add_([self._views[i] for i in moved], list(moved.values()))
        self.words = list(words)


def _wrapped(number: int) -> int:
    """Return ``number`` modulo 2**64, as int64."""
    return (number + 2**63) % 2**64 - 2**63


def bits_of(numbers: Sequence[float]) -> list[int]:
    """Return the bits of fp64 ``numbers`` as int64."""
    return list(struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers)))


def table_of(words: Sequence[int], device: torch.device, key: Hashable) -> Tensor:
    """Return a table with ``words``: the one kept for ``key`` and the current stream, written where they differ.

    While a CUDA graph is recorded it is a new one, in the graph's own memory: replays write it again.
    """
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        if torch.cuda.is_current_stream_capturing():
            made = Table(len(words), device)
            made.write(words)
            return made.tensor
    own = (device, stream, len(words), key)
    with _lock:
        found = _tables.pop(own, None) or Table(len(words), device)
        found.write(words)
        _tables[own] = found
        while len(_tables) > MOST_TABLES:
            _tables.popitem(last=False)
    return found.tensor
