"""Python's garbage collector, which waits while a graph is captured.

Before: it goes through all objects of the process in the middle of a first call, for a tenth to a fifth of its time,
as capturing makes hundreds of thousands of objects, which stay. After: it does so when it is its turn again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_waits(asked: bool = True) -> Iterator[None]:
    """Switch the collector off inside, where it is on; not unless ``asked``.

    It is one for all threads: of two that capture, the first that is done switches it on again.
    """
    was_on = asked and gc.isenabled()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
