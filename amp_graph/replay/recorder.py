"""Records a function's kernels as a CUDA graph; ``RECORDERS`` has a recorder for each device type.

Before: ``run(*args)``. After: ``replay, results = recorder.record(run, args)``; each ``replay()`` runs the same kernels
on the memory of ``args`` and fills the same ``results``. Source: torch/cuda/graphs.py, 2.11 - 2.13.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits

Replay = Callable[[], None]
Results = list[Any]


class CannotRecord(Exception):
    """A graph cannot be recorded, or must not be; the text is the reason."""


class CudaRecorder:
    """Records the functions of one slot, which run one after another and share memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is recorded yet."""
        self._device = device
        self._pool: Any = None
        self._graphs: list[Any] = []  # they keep the pool alive

    def record(self, run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> tuple[Replay, Results]:
        """Record ``run(*args)`` without running it; raises CannotRecord.

        CUDA forbids some calls while a stream records, in the default mode to every thread of the process: a thread
        that pins memory for a DataLoader would end the recording. The thread-local mode forbids them to this thread
        only. The garbage collector waits, because what it frees (events, other graphs) makes such calls from it.
        """
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        with Attempt(CannotRecord) as tried, torch.cuda.device(self._device), collector_waits():
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                results = run(*args)
            torch.cuda.current_stream().wait_stream(self._stream)
        if tried.error is not None:
            raise CannotRecord(f"recording failed: {tried.reason}") from tried.error
        self._graphs.append(graph)
        return graph.replay, list(results)


RECORDERS: dict[str, Callable[[torch.device], CudaRecorder]] = {"cuda": CudaRecorder}
