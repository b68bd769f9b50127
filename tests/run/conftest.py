"""Watching the calls of models in this process, as ``amp-graph run`` does."""

import copyreg

import pytest
from torch import nn

from amp_graph.capture.conversion import Conversion
from amp_graph.run import conversions
from amp_graph.run.options import RunOptions
from amp_graph.run.trained_models import TrainedModels, hear


@pytest.fixture
def watch(monkeypatch):
    """Return a function that starts to watch calls; all that is replaced in the process is put back."""
    ends = []
    monkeypatch.setattr(nn.Module, "__getstate__", nn.Module.__getstate__)
    entries = [(place, name) for place, names in conversions.ENTRIES for name in names]
    for place, name in entries:
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(conversions, "_models", type(conversions._models)())

    def start(policy="bf16", **options):
        models = TrainedModels(RunOptions.checked(policy, **options), print)
        ends[:0] = [hear(models), models.stop]
        return models

    yield start
    for end in ends:
        end()
    copyreg.dispatch_table.pop(Conversion, None)
