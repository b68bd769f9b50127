"""A precision plugin for ``pytorch_lightning``: ``Trainer(plugins=AmpGraphPrecision("bf16"))``; scripts that import ``lightning`` use the
module of that name here.
"""

from __future__ import annotations

from amp_graph.integrations.lightning_precision import ConvertsModules, LogsMetrics
from amp_graph.integrations.packages import missing

try:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins.precision import Precision
except ModuleNotFoundError as error:
    raise missing(error, "pytorch-lightning", "amp_graph.integrations.pytorch_lightning") from None


class AmpGraphPrecision(ConvertsModules, Precision):
    __doc__ = ConvertsModules.__doc__


class AmpGraphMetrics(LogsMetrics, Callback):
    __doc__ = LogsMetrics.__doc__
