"""Let the C library keep the memory that a training step frees, for the next step.

Before: each large tensor is new memory from the system, whose pages are cleared at the first write to each. After
``raise_malloc_thresholds()``: it is what an earlier tensor left.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_graph.errors import AllocatorError
from amp_graph.passes.native.jit_compiler import of_c_library

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 2**31 - 1  # what mallopt takes: an int
NEVER = -1  # as a trim threshold: nothing is given back


def raise_malloc_thresholds(bytes: int = 2**30) -> bool:
    """Have glibc's ``malloc`` reuse freed memory for blocks of up to ``bytes``; True if it will, else False.

    By default glibc maps every large block anew (from a threshold on that moves by itself, between 128 KiB and 32 MiB)
    and unmaps it when it is freed, so that large activations, gradients and temporaries cost a page fault for every
    4 KiB. Raised, such blocks come from the heap, which is never given back: the process stays as large as it once was.
    For the whole process and for good, whether anything is converted or not; ``torch.autocast`` gains by it as well.
    Call it before the first step. On other devices than the CPU it changes nothing that matters.

    bytes: from 1 to 2**31 - 1; larger blocks stay mapped. False: the C library has no ``mallopt`` (musl, macOS,
    Windows) or would not, and allocates as before. True says nothing of an allocator that stands in for glibc's
    (jemalloc). Raises AllocatorError for another number of bytes. Source: mallopt(3).
    """
    if not isinstance(bytes, int) or isinstance(bytes, bool) or not 1 <= bytes <= LARGEST:
        raise AllocatorError(
            f"raise_malloc_thresholds: bytes={bytes!r}\n  legal: a whole number from 1 to {LARGEST}\n"
            "  fix:   amp_graph.memory.raise_malloc_thresholds(bytes=2**30)"
        )
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, bytes) and mallopt(M_TRIM_THRESHOLD, NEVER))


def _mallopt() -> Callable[[int, int], int] | None:
    """Return the C library's ``mallopt``, or None where it has none."""
    return of_c_library("mallopt")
