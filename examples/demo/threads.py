"""How many threads help: torch's own choice, or one where other programs use the processors.

Threads that wait for one another while another program holds a processor made a step 50 times slower on two
cores; one thread is then the faster choice.
"""

from __future__ import annotations

import statistics
import time

import torch


def useful_threads(patience: float = 2.0) -> int:
    """Return as many as torch chose, or 1 where that is measured (for ``patience`` seconds) to be faster."""
    chosen = torch.get_num_threads()
    if chosen == 1:
        return 1
    many: list[float] = []
    one: list[float] = []
    end = time.monotonic() + patience
    try:
        while len(many) < 5 and time.monotonic() < end:
            many.append(_seconds(chosen))
            one.append(_seconds(1))
    finally:
        torch.set_num_threads(chosen)
    # The mean, since the rare long wait is what costs; one thread loses at most half on two quiet cores.
    return 1 if statistics.fmean(many) > statistics.fmean(one) else chosen


def _seconds(threads: int) -> float:
    """Return the time of twenty small operations."""
    torch.set_num_threads(threads)
    x, weight = torch.ones(256, 256), torch.ones(256, 256)
    began = time.perf_counter()
    for _ in range(20):
        torch.relu(x @ weight)
    return time.perf_counter() - began
