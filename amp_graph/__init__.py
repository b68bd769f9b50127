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
    from amp_graph.audit.session import audit as audit
    from amp_graph.convert import convert as convert
    from amp_graph.convert import revert as revert
    from amp_graph.errors import AmpGraphError as AmpGraphError
    from amp_graph.freeze import freeze as freeze
    from amp_graph.freeze import frozen as frozen
    from amp_graph.freeze import thaw as thaw
    from amp_graph.numerics.bisect import bisect as bisect
    from amp_graph.numerics.calibrate import calibrate as calibrate
    from amp_graph.numerics.compare import compare as compare
    from amp_graph.numerics.overflow.locate import locate as locate
    from amp_graph.numerics.overflow.scale_history import scale_history as scale_history
    from amp_graph.passes.calibration.calibration import Calibration as Calibration
    from amp_graph.policy import Policy as Policy
    from amp_graph.precision import precision as precision
    from amp_graph.report.metrics import metrics as metrics
    from amp_graph.report.model_report import report as report
    from amp_graph.rewrite import rewrite as rewrite
    from amp_graph.scaling.grad_scaler import GradScaler as GradScaler
    from amp_graph.scaling.loss_scale import LossScale as LossScale
    from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer as MixedPrecisionOptimizer
    from amp_graph.search.search import Limits as Limits
    from amp_graph.search.search import search as search
    from amp_graph.step.train_step import TrainStep as TrainStep
    from amp_graph.version import __version__ as __version__

_HOME = {
    "AmpGraphError": "errors",
    "Policy": "policy",
    "convert": "convert",
    "precision": "precision",
    "GradScaler": "scaling.grad_scaler",
    "LossScale": "scaling.loss_scale",
    "MixedPrecisionOptimizer": "scaling.mixed_precision_optimizer",
    "Calibration": "passes.calibration.calibration",
    "TrainStep": "step.train_step",
    "audit": "audit.session",
    "bisect": "numerics.bisect",
    "freeze": "freeze",
    "frozen": "freeze",
    "thaw": "freeze",
    "calibrate": "numerics.calibrate",
    "compare": "numerics.compare",
    "locate": "numerics.overflow.locate",
    "metrics": "report.metrics",
    "report": "report.model_report",
    "revert": "convert",
    "rewrite": "rewrite",
    "search": "search.search",
    "Limits": "search.search",
    "scale_history": "numerics.overflow.scale_history",
    "__version__": "version",
}
__all__ = [
    "AmpGraphError",
    "GradScaler",
    "LossScale",
    "MixedPrecisionOptimizer",
    "Policy",
    "TrainStep",
    "convert",
    "freeze",
    "precision",
    "report",
    "revert",
    "rewrite",
]


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'amp_graph' has no attribute {name!r}; it has {', '.join(__all__)}")
        made = self.__dict__[name] = getattr(importlib.import_module(f"amp_graph.{_HOME[name]}"), name)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        # A submodule must not hide its function.
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
