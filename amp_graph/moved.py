"""Modules under the paths that they had before there were folders: pickles name them, and so may users' imports.

Before: ``pickle.load`` of a model that was converted by an earlier version, a ModuleNotFoundError. After: it loads, and
is saved under the new path. A module is imported when something of it is asked for.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

HOMES = {
    "backend": "capture.dynamo_backend",
    "conversion": "capture.conversion",
    "grad_scaler": "scaling.grad_scaler",
    "graph_report": "report.records",
    "loss_scale": "scaling.loss_scale",
    "master_weights": "optim.master_weights",
    "mixed_precision_optimizer": "scaling.mixed_precision_optimizer",
    "train_step": "step.train_step",
}


class _Moved(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who goes through all modules imports none by it
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home = HOMES[self.__name__.removeprefix("amp_graph.")]
        return getattr(importlib.import_module(f"amp_graph.{home}"), name)


def keep_old_paths() -> None:
    """Let ``amp_graph.conversion`` and the others be imported, as what they are now."""
    for name, home in HOMES.items():
        path = f"amp_graph.{name}"
        sys.modules.setdefault(path, _Moved(path, f"See amp_graph.{home}."))
