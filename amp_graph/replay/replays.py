"""All recordings of one converted model: how many there may be, which goes first, and what the report says.

Before: a Conversion whose policy says ``replay=true``. After: ``replays.wrap(gm, run)`` for each captured graph.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.replay.guard_set import WARM_UP, Entry, GuardSet
from amp_graph.replay.slots import Slot, Wrap


class Replays:
    """The recordings of ``model``; ``mode``: "true", or "auto", which records where the host is the bottleneck."""

    def __init__(self, model: torch.nn.Module, mode: str) -> None:
        """Nothing is recorded yet."""
        self._model, self.mode = weakref.ref(model), mode
        self.lock = threading.RLock()
        self.pace = Pace(mode == "auto")
        self.guard_sets: list[GuardSet] = []

    def wrap(self, gm: GraphModule, run: Callable[..., Any], wrap: Wrap, why: str) -> Callable[..., Any]:
        """Return a callable that runs, records or replays ``gm``; ``run`` runs it as it is.

        why: a reason to record nothing, or "". What is returned holds no recording: Dynamo may keep it longer than the
        model lives.
        """
        made = GuardSet(self, gm, run, wrap, why)
        self.guard_sets.append(made)
        known = weakref.ref(made)

        def call(*args: Any) -> Any:
            found = known()
            return run(*args) if found is None else found(*args)

        return call

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, as long as it lives."""
        return self._model()

    def own_tensors(self) -> set[int]:
        """Return the ids of the model's parameters and buffers, which recordings read where they lie."""
        model = self.model
        return set() if model is None else {id(t) for t in (*model.parameters(), *model.buffers())}

    def _slots(self) -> list[Slot]:
        return [slot for one in self.guard_sets for entry in one.entries.values() for slot in entry.slots]

    # -- what the user asks ----------------------------------------------------------------------------

    def drop(self) -> int:
        """Free all recordings; return their bytes. Calls that wait for a backward keep theirs until then."""
        with self.lock:
            size = self.bytes
            for one in self.guard_sets:
                one.entries.clear()
        if size and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # else the pools stay reserved
        return size

    @property
    def bytes(self) -> int:
        """The bytes that recordings hold: inputs, results, saved values and gradients."""
        return sum(slot.bytes for slot in self._slots())

    def lines(self, size_text: Callable[[int], str]) -> Iterator[str]:
        """Yield the lines of a report: what is recorded, and for each graph why not."""
        yield f"replay={self.mode}: {len(self._slots())} recordings hold {size_text(self.bytes)}"
        entries = [e for one in self.guard_sets for e in one.entries.values()]
        if entries and all(e.calls <= WARM_UP for e in entries):
            yield f"replay: the model is not recorded: no graph had more than {WARM_UP} calls with inputs of one kind"
        for i, one in enumerate(self.guard_sets):
            if one.why:
                yield f"replay: graph {i} is not recorded: {one.why}"
                continue
            for why, number in Counter(e.why for e in one.entries.values() if e.why).items():
                kinds = f", for {number} of {len(one.entries)} kinds of inputs" if len(one.entries) > 1 else ""
                yield f"replay: graph {i} is not recorded{kinds}: {why}"


SLOWER = 1.2  # the device is the bottleneck if it takes this many times the host's time


class Pace:
    """Times warm-up calls on CUDA, if ``asked``."""

    def __init__(self, asked: bool) -> None:
        """Nothing is timed yet."""
        self.asked = asked

    def begin(self, entry: Entry, args: Sequence[Any]) -> Callable[[], None]:
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

    def why_not(self, entry: Entry) -> str:
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
