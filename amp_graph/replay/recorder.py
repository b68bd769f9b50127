"""Records a function's kernels as a CUDA graph; ``RECORDERS`` has a recorder for each device type.

Before: ``run(*args)``. After: ``replay, results = recorder.record(run, args)``; each ``replay()`` runs the same kernels
on the memory of ``args`` and fills the same ``results``. Source: torch/cuda/graphs.py, 2.11 - 2.13.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits
from amp_graph.passes.torch_compat.storage import address_of, bytes_of, storage_key

Replay = Callable[[], None]
Results = list[Any]


class CannotRecord(Exception):
    """A recording failed; the text is the reason."""


class Recorder(Protocol):
    """Records the functions of one slot, which run one after another and share memory."""

    def record(self, run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> tuple[Replay, Results]:
        """Record ``run(*args)`` without running it; raises CannotRecord."""
        ...

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Hear that nobody needs the contents of these tensors any more."""
        ...

    def bytes_held(self, known: Sequence[Tensor]) -> int:
        """Return the bytes of the recordings' memory, of which ``known`` are a part."""
        ...


def record(
    run: Callable[..., Sequence[Any]], args: Sequence[Any], pool: Any = None, stream: Any = None
) -> tuple[Replay, Sequence[Any]]:
    """Record a call without running it; return what replays it, and the results that each replay fills.

    CUDA forbids some calls while a stream records, in the default mode to every thread of the process: a thread that
    pins memory for a DataLoader would end the recording. The thread-local mode forbids them to this thread only. The
    garbage collector waits, because what it frees (events, other graphs) makes such calls from this thread.
    """
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    with collector_waits(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        results = run(*args)
    return graph.replay, results


class CudaRecorder:
    """Records on a side stream, into a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is recorded yet."""
        self._device = device
        self._pool: Any = None
        self._replays: list[Replay] = []  # their graphs keep the pool alive

    def record(self, run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> tuple[Replay, Results]:
        """Record ``run(*args)``."""
        with Attempt() as tried, torch.cuda.device(self._device):
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            stream, pool = self._stream, self._pool
            stream.wait_stream(torch.cuda.current_stream())
            replay, results = record(run, args, pool, stream)
            torch.cuda.current_stream().wait_stream(stream)
        if tried.error is not None:
            raise CannotRecord(f"recording failed: {tried.reason}") from tried.error
        self._replays.append(replay)
        return replay, list(results)

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Nothing has to be done."""

    def bytes_held(self, known: Sequence[Tensor]) -> int:
        """Return the size of the pool, and of the tensors in ``known`` beside it."""
        pool = tuple(self._pool or ())
        parts = [part for part in torch.cuda.memory_snapshot() if tuple(part.get("segment_pool_id", ())) == pool]
        spans = [(part["address"], part["address"] + part["total_size"]) for part in parts]
        beside = [t for t in known if not any(start <= address_of(t) < end for start, end in spans)]
        return sum(end - start for start, end in spans) + bytes_of_all(beside)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


def bytes_of_all(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the memory behind ``tensors``, shared memory counted once."""
    found = {storage_key(t): bytes_of(t) for t in tensors}
    return sum(found.values())
