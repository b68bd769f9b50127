"""A precision plugin for ``pytorch_lightning``: ``Trainer(plugins=AmpGraphPrecision("bf16"))``.

Before: ``Trainer(precision="bf16-mixed")``. After: that, in scripts that import
``pytorch_lightning``; those that import ``lightning`` use the module of that name here.
"""

from __future__ import annotations

from amp_graph.integrations import missing
from amp_graph.integrations.audits import Audits
from amp_graph.integrations.lightning_precision import ConvertsModules, LogsMetrics

try:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins.precision import Precision
except ModuleNotFoundError as error:
    raise missing(error, "pytorch-lightning", "amp_graph.integrations.pytorch_lightning") from None


class AmpGraphPrecision(ConvertsModules, Precision):
    """Trains in mixed precision: converts the modules that ``training_step`` calls, and scales losses in fp16.

    policy: as for ``amp_graph.convert``. scaler: for fp16; by default an ``amp_graph.GradScaler``; a
    ``torch.amp.GradScaler`` is legal as well. keep_converted: do not revert the modules when the trainer finishes.

    Raises PolicyError for a scaler with bf16, CaptureError for O2 and O3 under DDP, ScaleError for LBFGS with a scaler
    or at O2 and O3.
    """


class AmpGraphMetrics(LogsMetrics, Callback):
    """Logs the plugin's metrics to all loggers, once per ``log_every_n_steps``."""


class AmpGraphAudit(Audits, Callback):
    """Prints what precision a training really uses, and what is wrong with it, when it ends; it changes no bit.

    every: look at each step whose number it divides, beside the 2nd and the 3rd. page: a file for the report as an HTML
    page. ignore: codes of findings to leave out. ``report`` is the report of the last training.

    Raises AmpGraphError for a negative number and an unknown code.
    """
