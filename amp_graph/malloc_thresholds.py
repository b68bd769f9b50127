"""Makes the C library keep the memory that a training step frees, for the next step.

Before: each large tensor is new memory from the system, with a page fault at the first write to each page. After
``raise_malloc_thresholds()``: it reuses the memory of an earlier tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_graph.errors import AllocatorError
from amp_graph.passes.native.jit_compiler import of_c_library

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 2**31 - 1  # mallopt's argument is an int
NEVER = -1  # as a trim threshold: never return memory


def raise_malloc_thresholds(bytes: int = 2**30) -> bool:
    """Make glibc's ``malloc`` reuse freed memory for blocks of up to ``bytes``; return True if it accepts.

    By default glibc maps every large block (above a dynamic threshold between 128 KiB and 32 MiB) and unmaps it when it
    is freed. So large activations, gradients and temporaries cost a page fault for every 4 KiB. With raised thresholds
    such blocks come from the heap, which never shrinks: the process keeps its peak size. This holds for the whole
    process until it ends, converted or not; ``torch.autocast`` gets faster as well. Call it before the first step. It
    does not matter for devices other than the CPU.

    bytes: from 1 to 2**31 - 1; larger blocks stay mapped. False: the C library has no ``mallopt`` (musl, macOS,
    Windows) or refused, and allocates as before. True does not mean that a replacement allocator (jemalloc) follows.
    Raises AllocatorError for another number of bytes. Source: mallopt(3).
    """
    if not isinstance(bytes, int) or isinstance(bytes, bool) or not 1 <= bytes <= LARGEST:
        raise AllocatorError(
            f"raise_malloc_thresholds: bytes={bytes!r}\n  legal: a whole number from 1 to {LARGEST}\n"
            "  fix:   amp_graph.memory.raise_malloc_thresholds(bytes=2**30)"
        )
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, bytes) and mallopt(M_TRIM_THRESHOLD, NEVER))


def _mallopt() -> Callable[[int, int], int] | None:
    """Return the C library's ``mallopt``, or None."""
    return of_c_library("mallopt")
