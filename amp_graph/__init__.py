"""Automatic mixed precision for PyTorch as a graph pass: what runs in which precision, and why.

>>> import amp_graph
>>> model = amp_graph.convert(model)
>>> print(amp_graph.report(model).text())

Names are imported when first used, so that ``amp-graph --help`` does not wait for torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_graph import optim as optim
    from amp_graph.convert import convert as convert
    from amp_graph.convert import drop_weight_copies as drop_weight_copies
    from amp_graph.convert import revert as revert
    from amp_graph.errors import AmpGraphError as AmpGraphError
    from amp_graph.grad_scaler import GradScaler as GradScaler
    from amp_graph.loss_scale import LossScale as LossScale
    from amp_graph.malloc_thresholds import raise_malloc_thresholds as raise_malloc_thresholds
    from amp_graph.mixed_precision_optimizer import MixedPrecisionOptimizer as MixedPrecisionOptimizer
    from amp_graph.policy import Policy as Policy
    from amp_graph.precision import precision as precision
    from amp_graph.report import report as report
    from amp_graph.rewrite import rewrite as rewrite
    from amp_graph.train_step import TrainStep as TrainStep

_HOME = {"AmpGraphError": "errors", "Policy": "policy", "convert": "convert", "precision": "precision"}
_HOME |= {
    "GradScaler": "grad_scaler",
    "LossScale": "loss_scale",
    "MixedPrecisionOptimizer": "mixed_precision_optimizer",
    "TrainStep": "train_step",
    "drop_weight_copies": "convert",
    "optim": "",  # a module, whose names are torch.optim's
    "raise_malloc_thresholds": "malloc_thresholds",
    "report": "report",
    "revert": "convert",
    "rewrite": "rewrite",
}
__all__ = [
    "AmpGraphError",
    "GradScaler",
    "LossScale",
    "MixedPrecisionOptimizer",
    "Policy",
    "TrainStep",
    "convert",
    "drop_weight_copies",
    "optim",
    "precision",
    "raise_malloc_thresholds",
    "report",
    "revert",
    "rewrite",
]


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'amp_graph' has no attribute {name!r}; it has {', '.join(__all__)}")
        home = importlib.import_module(f"amp_graph.{_HOME[name] or name}")
        made = self.__dict__[name] = getattr(home, name) if _HOME[name] else home
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        # A submodule must not hide its function.
        if not _HOME.get(name) or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
