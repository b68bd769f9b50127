"""All recordings of one converted model: how many there may be, which goes first, and what the report says.

Before: a Conversion whose policy says ``replay=true``. After: ``replays.wrap(gm, ...)`` for each captured graph.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.replay.guard_set import WARM_UP, GuardSet
from amp_graph.replay.slots import Slot


class Replays:
    """The recordings of ``model``."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Nothing is recorded yet."""
        self._model = weakref.ref(model)
        self.lock = threading.RLock()
        self.guard_sets: list[GuardSet] = []

    def wrap(
        self, gm: GraphModule, run: Callable[..., Any], recorded: Callable[..., Any], why: str
    ) -> Callable[..., Any]:
        """Return a callable that runs, records or replays ``gm``; ``run`` runs it as it is, for ``recorded`` see below.

        recorded: what is recorded: it runs the graph alone, and takes no other rung where that fails.

        why: a reason to record nothing, or "". What is returned holds no recording: Dynamo may keep it longer than the
        model lives.
        """
        made = GuardSet(self, gm, run, recorded, why)
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
        yield f"replay=true: {len(self._slots())} recordings hold {size_text(self.bytes)}"
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
