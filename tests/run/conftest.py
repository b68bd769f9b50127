"""Watching the calls of models in this process, as ``amp-graph run`` does."""

import copyreg
import importlib

import pytest
import torch
from torch import nn

from amp_graph.capture.conversion import Conversion
from amp_graph.passes.torch_compat import optimizers
from amp_graph.run import conversions
from amp_graph.run.loss_scaling import REFUSED
from amp_graph.run.options import RunOptions
from amp_graph.run.trained_models import TrainedModels, hear


@pytest.fixture
def watch(request, monkeypatch):
    """Return a function that starts to watch calls; all that is replaced in the process is put back."""
    ends = []
    monkeypatch.setattr(nn.Module, "__getstate__", nn.Module.__getstate__)
    entries = [(place, name) for place, names in conversions.ENTRIES for name in names]
    for place, name in (*entries, *(refused[:2] for refused in REFUSED), (torch.autograd, "backward")):
        monkeypatch.setattr(place, name, getattr(place, name))
    hooks = importlib.import_module("torch.optim.optimizer")
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(hooks, name, getattr(hooks, name).copy())
    monkeypatch.setattr(optimizers, "_ON_STEP", {*optimizers._ON_STEP})
    monkeypatch.setattr(conversions, "_models", type(conversions._models)())

    policy = getattr(request.module, "POLICY", "bf16")

    def start(**options):
        models = TrainedModels(RunOptions.checked(policy, **options), print)
        ends[:0] = [hear(models.before, models.after, models.under_autocast, models.failed), models.stop]
        if policy == "fp16":
            models.scaling.start()
        return models

    yield start
    for end in ends:
        end()
    copyreg.dispatch_table.pop(Conversion, None)
