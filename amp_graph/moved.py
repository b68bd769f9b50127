"""Keeps former module paths importable, for pickles and users' imports.

Before: ``pickle.load`` of a model that an earlier version converted raises ModuleNotFoundError. After: it loads, and is
saved under the new path. A module is imported at the first access to one of its attributes.
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
        if name.startswith("__"):  # code that iterates over all modules must not import them
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home = HOMES[self.__name__.removeprefix("amp_graph.")]
        return getattr(importlib.import_module(f"amp_graph.{home}"), name)


def keep_old_paths() -> None:
    """Make ``amp_graph.conversion`` and the other former paths importable."""
    for name, home in HOMES.items():
        path = f"amp_graph.{name}"
        sys.modules.setdefault(path, _Moved(path, f"See amp_graph.{home}."))
