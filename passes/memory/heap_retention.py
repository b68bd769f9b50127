"""Keep the memory that a step frees in the C library's heap, so that the next step gets it without page faults.

Before: after a step's last activations, the end of the heap is free. glibc returns it to the system, and the next step
gets it as new pages, which are cleared at the first write.
After: a block beyond them keeps the heap at its length. The free memory below is not reserved: any allocation may use
it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from amp_graph.passes.native.jit_compiler import of_c_library

PIECE = 120 << 10  # glibc takes blocks below 128 KiB from the heap, whatever its dynamic thresholds are
# Where glibc takes larger blocks from its heap, too: the number of pieces that is enough, and the largest piece.
FEW, LARGE = 128, 4 << 20
FAR = 1 << 32  # bytes; the distance between the heap and mmapped blocks is larger
# Heap kept, as a multiple of the bytes alive at once: covers kernels' own allocations, and gaps that nothing fits in.
# With 2, most steps needed more in 5 of 80 processes, depending on block placement; with 3 in none. What no step
# touches costs no memory.
BESIDE = 3
OFTEN, SELDOM = 8, 64  # steps whose page faults are counted together
SETTLED = 3  # steps that are not counted: the first ones, also after the heap was kept anew, get new pages
SOME = 32  # page faults for this fraction of a step's memory show that the heap lacks it


class Allocator(NamedTuple):
    """The C library's functions; addresses are numbers, and 0 is none."""

    malloc: Callable[[int], int | None]
    free: Callable[[int | None], None]
    malloc_trim: Callable[[int], int]


@lru_cache
def glibc() -> Allocator | None:
    """Return glibc's functions; None with another C library."""
    malloc, free, trim = map(of_c_library, Allocator._fields)
    if malloc is None or free is None or trim is None or of_c_library("gnu_get_libc_version") is None:
        return None
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    trim.argtypes = (ctypes.c_size_t,)
    return Allocator(malloc, free, trim)


class KeptHeap:
    """Keeps the heap long enough for the largest need among all living owners.

    C libraries other than glibc keep freed memory by themselves.
    """

    def __init__(self, allocator: Callable[[], Allocator | None]) -> None:
        """Take a function that finds the allocator; it is called at the first need."""
        self.by_default = False  # whether to keep memory for graphs whose policy leaves it open
        self._allocator = allocator
        self._needs: dict[int, int] = {}
        self._size = 0
        self._block = 0  # the address of the block at the end
        self._lock = threading.RLock()  # an owner may be finalized while another one is registered

    def keep_for_steps(self, owner: object, at_once: int) -> int:
        """Keep memory for steps with ``at_once`` bytes of tensors alive at the same time; as ``keep``."""
        return self.keep(owner, BESIDE * at_once)

    def watch(self, owner: object, at_once: int) -> Callable[[], None]:
        """Return a function to call before every step of ``owner``; it keeps the heap anew if others took memory of it.

        A long-lived tensor, such as another model's weight, may come to occupy memory that a step used. Page faults are
        counted over ``OFTEN`` steps, and over up to ``SELDOM`` steps while all is well, because missing memory shows in
        some steps only. The interval doubles each time that keeping anew did not help, because results may be mapped
        separately. Of several owners, the one that needs most watches the heap for all.
        """
        import resource  # Unix only, as are the C libraries for which anything is kept

        known, few = weakref.ref(owner), at_once // SOME / resource.getpagesize()
        left, pause, before, kept = SETTLED, OFTEN, -1, False

        def watch() -> None:
            nonlocal left, pause, before, kept
            left -= 1
            if left > 0:
                return
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            if before < 0:  # from here on
                left, before = pause, faults
                return
            found = faults - before > few * pause
            if found and (alive := known()) is not None and self._is_of_the_largest(alive):
                self.keep_for_steps(alive, at_once)
            pause = (2 * pause if kept else OFTEN) if found else min(2 * pause, SELDOM)
            left, before, kept = (SETTLED, -1, True) if found else (pause, faults, False)

        return watch

    def keep(self, owner: object, need: int) -> int:
        """Keep ``need`` bytes free for as long as ``owner`` lives; return how many will be, 0 where that is impossible.

        Pages that were never written take no memory. Threads other than the main one have heaps of 64 MiB each: nothing
        is kept for them.
        """
        calls = self._allocator()
        if calls is None or need < PIECE or threading.current_thread() is not threading.main_thread():
            return 0
        with self._lock:
            again = id(owner) in self._needs
            self._needs[id(owner)] = need
            if not again:
                weakref.finalize(owner, self._leave, id(owner)).atexit = False
            most = max(self._needs.values())
            # Even if it needs no more: long-lived memory, such as optimizer state, now occupies some of what was kept.
            block = _block_beyond(calls, most, trims=not again)
            if not block:
                return need if self._size >= need else 0
            block, self._block = self._block, block
            self._size = most
            calls.free(block)
            return need

    def _is_of_the_largest(self, owner: object) -> bool:
        """Say whether no other owner needs more: the heap is kept for the one that needs most."""
        with self._lock:
            return self._needs.get(id(owner), 0) >= max(self._needs.values(), default=0)

    def _leave(self, owner: int) -> None:
        with self._lock:
            self._needs.pop(owner, None)
            calls, need = self._allocator(), max(self._needs.values(), default=0)
            if calls is None or need >= self._size:
                return
            calls.free(self._block)
            calls.malloc_trim(0)  # also the gaps between blocks that others have allocated meanwhile
            self._block = _block_beyond(calls, need) if need else 0
            self._size = need if self._block else 0


def _block_beyond(calls: Allocator, size: int, *, trims: bool = True) -> int:
    """Return the address of a block with ``size`` free heap bytes before it; 0 if the system refuses.

    ``trims``: release all pages of these bytes; otherwise written pages stay, as the next step writes to them.
    """
    piece = max(PIECE, min(size // FEW, LARGE))
    if piece > PIECE:
        # Like every tensor of that size: after one was freed, glibc takes others from the heap, unless configured
        # otherwise.
        calls.free(calls.malloc(piece))
    pieces = _pieces(calls, -(-size // piece) + 1, piece)
    if piece > PIECE and pieces and pieces[-1] - pieces[0] > FAR + 2 * size:  # each mapped separately
        _free(calls, pieces)
        pieces = _pieces(calls, -(-size // PIECE) + 1, PIECE)
    if not pieces:
        return 0
    last = pieces.pop()
    _free(calls, pieces)
    if trims:
        calls.malloc_trim(0)  # their first pages; all pages if the system maps huge pages unasked
    return last


def _pieces(calls: Allocator, count: int, size: int) -> list[int]:
    """Return the addresses of ``count`` blocks, sorted, one of them small; none if not all can be allocated."""
    found: list[int] = []
    while len(found) < count:
        made = calls.malloc(size if found else PIECE)
        if made is None:
            _free(calls, found)
            return []
        found.append(made)
    return sorted(found)


def _free(calls: Allocator, blocks: list[int]) -> None:
    for block in blocks:
        calls.free(block)


HEAP = KeptHeap(glibc)
