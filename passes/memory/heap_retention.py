"""Memory that a step leaves free in the heap of the C library, and the next one takes: no new pages at each step.

Before: with a step's last activations the end of the heap is free, glibc gives it back to the system, and the next step
gets it as new pages, each cleared at the first write to it. After: a block beyond them keeps the heap as long as it is.
What is free below serves whoever allocates: it is not set aside.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from amp_graph.passes.native.jit_compiler import of_c_library

PIECE = 120 << 10  # glibc takes what is smaller than 128 KiB from the heap, whatever its thresholds have become
# Where glibc takes larger blocks from its heap, too: how many pieces are enough, and the largest.
FEW, LARGE = 128, 4 << 20
FAR = 1 << 32  # bytes between the heap and what is mapped are more
# Times what is alive at once: what kernels allocate beside that, and gaps that nothing fits in. With 2 most steps went
# beyond in 5 of 80 processes, by where their blocks happened to lie; with 3 in none. What no step takes is no memory.
BESIDE = 3
OFTEN, SELDOM = 8, 64  # steps whose page faults are looked at together
SETTLED = 3  # steps whose faults are not: the first ones, also after the heap was kept anew, get new pages
SOME = 32  # of a step's memory the part whose page faults show that it lacks it


class Allocator(NamedTuple):
    """The C library's functions; addresses are numbers, and 0 is none."""

    malloc: Callable[[int], int | None]
    free: Callable[[int | None], None]
    malloc_trim: Callable[[int], int]


@lru_cache
def glibc() -> Allocator | None:
    """Return glibc's functions; None where the C library is another."""
    malloc, free, trim = map(of_c_library, Allocator._fields)
    if malloc is None or free is None or trim is None or of_c_library("gnu_get_libc_version") is None:
        return None
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    trim.argtypes = (ctypes.c_size_t,)
    return Allocator(malloc, free, trim)


class KeptHeap:
    """Keeps the heap so long that the largest of the needs of all owners that are alive fits in.

    Other C libraries than glibc keep memory by themselves.
    """

    def __init__(self, allocator: Callable[[], Allocator | None]) -> None:
        """Take what finds the allocator, at the first need."""
        self.by_default = False  # whether graphs whose policy leaves it open are to have memory kept
        self._allocator = allocator
        self._needs: dict[int, int] = {}
        self._size = 0
        self._block = 0  # the address of what stands at the end
        self._lock = threading.RLock()  # an owner may die, and say so, while another one is taken up

    def keep_for_steps(self, owner: object, at_once: int) -> int:
        """Keep what steps need that have ``at_once`` bytes of tensors alive at the same time; as ``keep``."""
        return self.keep(owner, BESIDE * at_once)

    def watch(self, owner: object, at_once: int) -> Callable[[], None]:
        """Return what is to be called before every step of ``owner``, and keeps anew what others have taken since.

        What lasts, as another model's weights, may come to lie where a step had its memory. The page faults of
        ``OFTEN`` steps, and of ``SELDOM`` where all is well, are looked at together, as what is lacking shows in some
        steps only; those of ever more where keeping anew has not helped, as results may be mapped each on its own. Of
        several owners the one that needs most looks after the heap of all.
        """
        import resource  # of Unix, as are the C libraries that anything is kept in

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
        """Keep ``need`` bytes free for as long as ``owner`` lives; return how many will be, 0 where that cannot be.

        Pages that nothing has written to are no memory yet. Threads but the main one have heaps of 64 MiB each: nothing
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
            # Anew, though it may need no more: what lasts, as an optimizer's state, has come to lie before the last.
            block = _block_beyond(calls, most, trims=not again)
            if not block:
                return need if self._size >= need else 0
            block, self._block = self._block, block
            self._size = most
            calls.free(block)
            return need

    def _is_of_the_largest(self, owner: object) -> bool:
        """Say whether no other owner needs more: the heap is kept for the one that does."""
        with self._lock:
            return self._needs.get(id(owner), 0) >= max(self._needs.values(), default=0)

    def _leave(self, owner: int) -> None:
        with self._lock:
            self._needs.pop(owner, None)
            calls, need = self._allocator(), max(self._needs.values(), default=0)
            if calls is None or need >= self._size:
                return
            calls.free(self._block)
            calls.malloc_trim(0)  # also what lies between blocks that others have put there meanwhile
            self._block = _block_beyond(calls, need) if need else 0
            self._size = need if self._block else 0


def _block_beyond(calls: Allocator, size: int, *, trims: bool = True) -> int:
    """Return the address of a block with ``size`` free bytes of the heap before it; 0 where the system refuses.

    ``trims``: no page of these is memory yet; otherwise those that were stay so, as the next step writes to them.
    """
    piece = max(PIECE, min(size // FEW, LARGE))
    if piece > PIECE:
        # As of every tensor of that size: once one was freed, glibc takes others from the heap, unless told otherwise.
        calls.free(calls.malloc(piece))
    pieces = _pieces(calls, -(-size // piece) + 1, piece)
    if piece > PIECE and pieces and pieces[-1] - pieces[0] > FAR + 2 * size:  # each mapped on its own
        _free(calls, pieces)
        pieces = _pieces(calls, -(-size // PIECE) + 1, PIECE)
    if not pieces:
        return 0
    last = pieces.pop()
    _free(calls, pieces)
    if trims:
        calls.malloc_trim(0)  # their first pages; and where the system maps large ones unasked, all
    return last


def _pieces(calls: Allocator, count: int, size: int) -> list[int]:
    """Return the addresses of so many blocks, one of them small, in order; of none, where not all can be had."""
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
