"""AMP208 and AMP209: checkpoints that hold an optimizer and not its scaler, and resumes with a fresh scale."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from amp_graph.audit.codes import finding
from amp_graph.audit.records import Event, Finding, Place, Watcher

OPTIMIZER = {"state", "param_groups"}  # keys of a state
SCALER = {"scale", "growth_factor", "backoff_factor"}
DEEP = 4  # levels of dicts and lists that are looked into


@dataclass(eq=False)
class ScalerCheckpoints(Watcher):
    """Looks into what is saved and loaded."""

    _saves: Counter[Place] = field(default_factory=Counter)  # of optimizers' states
    _seen: set[str] = field(default_factory=set)  # "save scaler" for one in a file, "scaler.state_dict" for a call
    _resumed: weakref.WeakKeyDictionary[Optimizer, Place] = field(default_factory=weakref.WeakKeyDictionary)
    _stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)  # by a scaler
    _lost: dict[Place, float] = field(default_factory=dict)  # where an optimizer was resumed, and its scale then

    def heard(self, event: Event) -> None:
        """Take what is saved, loaded and stepped."""
        if event.name in ("save", "load") and event.is_after:
            kinds = {*_kinds(event.arguments["obj"] if event.name == "save" else event.result)}
            self._seen |= {f"{event.name} {kind}" for kind in kinds}
            self._saves[event.place] += event.name == "save" and "optimizer" in kinds
        elif event.name == "optimizer.load_state_dict" and event.is_after:
            optimizer = event.arguments["self"]
            if event.arguments["state_dict"].get("state") and optimizer not in self._stepped:
                self._resumed[optimizer] = event.place
        elif event.name.startswith("scaler.") and not event.is_after:
            self._seen.add(event.name)
            if event.name == "scaler.step" and (optimizer := event.arguments["optimizer"]) not in self._stepped:
                self._stepped.add(optimizer)
                if optimizer in self._resumed and "scaler.load_state_dict" not in self._seen:
                    self._lost[self._resumed[optimizer]] = event.arguments["self"].get_scale()

    def findings(self) -> Iterator[Finding]:
        """Yield checkpoints, and resumes, without the scaler."""
        is_lost = "scaler.step" in self._seen and self._seen.isdisjoint(("save scaler", "scaler.state_dict"))
        for place, times in self._saves.items() if is_lost else ():
            if times:
                yield finding(
                    "AMP208", place, f"{times} checkpoints hold the optimizer's state, and the GradScaler's was never "
                    "taken: a resumed run begins with the first scale, and skips steps or loses gradients at first",
                    '{..., "scaler": scaler.state_dict()} in the checkpoint', checkpoints=times,
                )  # fmt: skip
        is_read = "load scaler" in self._seen
        read = "which is in the file that was loaded" if is_read else "which was in no file that was loaded"
        for place, scale in self._lost.items():
            yield finding(
                "AMP209", place, f"the optimizer was resumed here, and the GradScaler's state, {read}, was not: its "
                f"scale began at {scale:g}", 'scaler.load_state_dict(checkpoint["scaler"])', scale=scale,
                read=is_read,
            )  # fmt: skip


def _kinds(saved: Any, depth: int = 0) -> Iterator[str]:
    """Yield "optimizer" and "scaler" for the states in what is saved or was loaded."""
    if isinstance(saved, torch.amp.GradScaler) or (isinstance(saved, Mapping) and saved.keys() >= SCALER):
        yield "scaler"
    elif isinstance(saved, Mapping) and saved.keys() >= OPTIMIZER:
        yield "optimizer"
    elif isinstance(saved, (Mapping, list, tuple)) and depth < DEEP:
        for one in saved.values() if isinstance(saved, Mapping) else saved:
            yield from _kinds(one, depth + 1)
