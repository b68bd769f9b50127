"""AMP208 and AMP209: checkpoints that hold an optimizer and not its scaler, and resumes with a fresh scale."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from amp_graph.audit.codes import finding
from amp_graph.audit.records import Event, Finding, Place, Training, Watcher

OPTIMIZER = {"state", "param_groups"}  # keys of a state
SCALER = {"scale", "growth_factor", "backoff_factor"}
DEEP = 4  # levels of dicts and lists that are looked into


class ScalerCheckpoints(Watcher):
    """Looks into what is saved and loaded."""

    def __init__(self, training: Training) -> None:
        """Begin."""
        super().__init__(training)
        self._saves: Counter[Place] = Counter()  # of optimizers' states
        self._scaler_saved = self._scaler_loaded = self._scaler_read = self._scaled = False
        self._resumed: weakref.WeakKeyDictionary[Optimizer, Place] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._lost: dict[Place, float] = {}  # where an optimizer was resumed, and the scale that it then had

    def heard(self, event: Event) -> None:
        """Take what is saved, loaded and stepped."""
        if event.name == "save" and not event.is_after:
            kinds = set(_kinds(event.arguments["obj"]))
            self._saves[event.place] += "optimizer" in kinds
            self._scaler_saved |= "scaler" in kinds
        elif event.name == "load" and event.is_after:
            self._scaler_read |= "scaler" in set(_kinds(event.result))
        elif event.name == "optimizer.load_state_dict" and event.is_after:
            optimizer = event.arguments["self"]
            if event.arguments["state_dict"].get("state") and optimizer not in self._stepped:
                self._resumed[optimizer] = event.place
        elif event.name.startswith("scaler.") and not event.is_after and event.arguments["self"].is_enabled():
            self._scaler_saved |= event.name == "scaler.state_dict"
            self._scaler_loaded |= event.name == "scaler.load_state_dict"
            if event.name == "scaler.step":
                self._step(event.arguments["self"], event.arguments["optimizer"])

    def _step(self, scaler: Any, optimizer: Optimizer) -> None:
        self._scaled = True
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            if optimizer in self._resumed and not self._scaler_loaded:
                self._lost[self._resumed[optimizer]] = scaler.get_scale()

    def findings(self) -> Iterator[Finding]:
        """Yield checkpoints, and resumes, without the scaler."""
        for place, times in self._saves.items():
            if times and self._scaled and not self._scaler_saved:
                yield finding(
                    "AMP208", place, f"{times} checkpoints hold the optimizer's state, and the GradScaler's was never "
                    "taken: a resumed run begins with the first scale, and skips steps or loses gradients at first",
                    '{..., "scaler": scaler.state_dict()} in the checkpoint', checkpoints=times,
                )  # fmt: skip
        read = "which is in the file that was loaded" if self._scaler_read else "which was in no file that was loaded"
        for place, scale in self._lost.items():
            yield finding(
                "AMP209", place, f"the optimizer was resumed here, and the GradScaler's state, {read}, was not: its "
                f"scale began at {scale:g}", 'scaler.load_state_dict(checkpoint["scaler"])', scale=scale,
                read=self._scaler_read,
            )  # fmt: skip


def _kinds(saved: Any, depth: int = 0) -> Iterator[str]:
    """Yield "optimizer" and "scaler" for the states in what is saved or was loaded."""
    if isinstance(saved, torch.amp.GradScaler):
        yield "scaler"
    elif isinstance(saved, Mapping) and saved.keys() >= SCALER:
        yield "scaler"
    elif isinstance(saved, Mapping) and saved.keys() >= OPTIMIZER:
        yield "optimizer"
    elif isinstance(saved, (Mapping, list, tuple)) and depth < DEEP:
        for one in saved.values() if isinstance(saved, Mapping) else saved:
            yield from _kinds(one, depth + 1)
