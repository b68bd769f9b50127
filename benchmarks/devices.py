"""What differs between a CPU and a GPU in a measurement: the clock, the peak of memory, and what must be there.

Before: ``--device cuda``. After: ``Device``: its ``clock()`` waits for the GPU, ``peak(run)`` asks its allocator.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True)
class Device:
    """Where is measured, and by which clock: ``cpu_time`` is that of the process, steadier where cores are shared."""

    name: str = "cpu"
    cpu_time: bool = False

    def clock(self) -> float:
        """Return seconds, all work that was given to the device done."""
        if self.name == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.cpu_time else time.perf_counter()

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes that ``run`` holds at once beyond what is held before it, of PyTorch's allocator."""
        return _peak_on_cuda(run) if self.name == "cuda" else _peak_on_cpu(run)

    def kernels(self, run: Callable[[], object]) -> tuple[int, float] | None:
        """Return how many kernels and copies ``run`` starts on a GPU, and their milliseconds; None on a CPU."""
        if self.name != "cuda":
            return None
        run()
        torch.cuda.synchronize()
        with _without_output(), profile(activities=[ProfilerActivity.CUDA]) as recorded:
            run()
            torch.cuda.synchronize()
        took = [e.duration_ns() for e in recorded.profiler.kineto_results.events() if e.device_type().name == "CUDA"]
        return len(took), sum(took) / 1e6


def _peak_on_cpu(run: Callable[[], object]) -> int:
    """Add up the allocations and releases that the profiler sees; scratch memory inside of oneDNN is not among them."""
    with _without_output(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = top = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            top = max(top, held)
    return top


def _peak_on_cuda(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def _without_output():
    """Keep the profiler's own lines, which it writes below Python, out of the benchmark's output."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def raise_malloc_thresholds() -> bool:
    """Let glibc keep blocks of up to 1 GiB on its heap, and the heap as large as it was: mallopt(3)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, 1 << 30) and mallopt(M_TRIM_THRESHOLD, -1))


def prepare(
    device: str, *, cpu_time: bool, cudnn_benchmark: bool, cuda_graphs: bool, raised_thresholds: bool
) -> Device:
    """Set the process up as asked, for all variants alike; SystemExit where the machine lacks what is asked for."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: this torch sees no CUDA device\n  legal: cpu\n  fix:   --device cpu")
    if device == "cpu" and (cudnn_benchmark or cuda_graphs):
        raise SystemExit("--cudnn-benchmark, --cuda-graphs: only with a GPU\n  fix:   add --device cuda")
    if device == "cuda" and cpu_time:
        raise SystemExit("--cpu-time: the time of the process is not that of the GPU\n  fix:   leave it out")
    if cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if cuda_graphs:  # what torch.compile(mode="reduce-overhead") sets, here for what each side compiles
        import torch._inductor.config as inductor

        inductor.triton.cudagraphs = True
    if raised_thresholds and not raise_malloc_thresholds():
        raise SystemExit("--raised-thresholds: this C library has no mallopt\n  legal: glibc\n  fix:   leave it out")
    return Device(device, cpu_time)
