"""Watching the calls of models in this process, as ``amp-graph run`` does."""

import copyreg
import multiprocessing.process
from functools import partial

import pytest
from torch import nn

from amp_graph.capture.conversion import Conversion
from amp_graph.run import conversions
from amp_graph.run.module_calls import hear
from amp_graph.run.options import RunOptions
from amp_graph.run.step_times import StepTimes
from amp_graph.run.trained_models import TrainedModels


@pytest.fixture
def watch(request, monkeypatch):
    """Return a function that starts to watch calls; all that is replaced in the process is put back."""
    ends = []
    monkeypatch.setattr(nn.Module, "__getstate__", nn.Module.__getstate__)
    for place, names in conversions.ENTRIES:
        for name in filter(partial(hasattr, place), names):
            monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", multiprocessing.process.BaseProcess.start)
    monkeypatch.setattr(conversions, "_models", type(conversions._models)())

    policy = getattr(request.module, "POLICY", "bf16")

    def start(**options):
        models = TrainedModels(RunOptions.checked(policy, **options), StepTimes(options.get("measure", False)), print)
        scales = [models.scaling.start()] if policy == "fp16" else []
        ends[:0] = [hear(models), *scales, models.times.end, models.stop]
        return models

    yield start
    for end in ends:
        end()
    copyreg.dispatch_table.pop(Conversion, None)
