"""A precision plugin for ``lightning.pytorch``: ``Trainer(plugins=AmpGraphPrecision("bf16"))``; scripts that import ``pytorch_lightning`` use the
module of that name here.
"""

from __future__ import annotations

from amp_graph.integrations.lightning_precision import ConvertsModules, LogsMetrics
from amp_graph.integrations.packages import missing

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import Precision
except ModuleNotFoundError as error:
    raise missing(error, "lightning", "amp_graph.integrations.lightning") from None


class AmpGraphPrecision(ConvertsModules, Precision):
    __doc__ = ConvertsModules.__doc__


class AmpGraphMetrics(LogsMetrics, Callback):
    __doc__ = LogsMetrics.__doc__
