"""Whether the host or the device is the bottleneck of a call, measured in warm-up without waiting for the device.

A recording saves host time and nothing else. Where the device is busy longer than Python, it would hold memory for
nothing: ``replay=auto`` does not record there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

SLOWER = 1.2  # the device is the bottleneck if it takes this many times the host's time


class Timed(Protocol):
    """Calls that are timed: for each, the events around it, and the seconds of the host."""

    timings: list[tuple[Any, Any, float]]


class Pace:
    """Times warm-up calls on CUDA, if ``asked``."""

    def __init__(self, asked: bool) -> None:
        """Nothing is timed yet."""
        self.asked = asked

    def begin(self, entry: Timed, args: Sequence[Any]) -> Callable[[], None]:
        """Time a call that begins now; the returned function ends it."""
        if not self.asked or not any(isinstance(a, Tensor) and a.is_cuda for a in args):
            return _nothing
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        start = time.perf_counter()

        def end() -> None:
            seconds = time.perf_counter() - start
            last.record()
            entry.timings.append((first, last, seconds))

        return end

    def why_not(self, entry: Timed) -> str:
        """Return why a recording would gain nothing; "" if it would, or if nothing was timed.

        The first call is left out, as it loads and chooses kernels. The device's time is between events that it
        reaches in its own time: where it lags behind Python, they tell its time alone.
        """
        if not self.asked or len(entry.timings) < 2:
            return ""
        behind = [timing for timing in entry.timings[1:] if not timing[1].query()]
        done = [(a.elapsed_time(b) / 1e3, host) for a, b, host in entry.timings[1:] if b.query()]
        entry.timings.clear()
        if not done:
            return f"the device is the bottleneck: it has not finished {len(behind)} earlier calls"
        device, host = min(device for device, _ in done), min(host for _, host in done)
        if device <= SLOWER * host:
            return ""
        return f"the device is the bottleneck: {device * 1e3:.2f} ms of a forward, where Python takes {host * 1e3:.2f}"


def _nothing() -> None:
    """End nothing."""
