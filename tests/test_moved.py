"""What was pickled, or imported by its path, before files moved into folders: it loads as what it is now."""

import importlib
import pickle
import pickletools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import amp_graph
from amp_graph.moved import HOMES

X = torch.arange(32.0).reshape(4, 8)
OLD = {f"amp_graph.{home}": f"amp_graph.{name}" for name, home in HOMES.items()}
OLD |= {"amp_graph.optim.optimizers": "amp_graph.optim", "amp_graph.report.model_report": "amp_graph.report"}
CLASSES = [
    ("conversion", "restore"), ("train_step", "TrainStep"), ("grad_scaler", "GradScaler"), ("loss_scale", "LossScale"),
    ("mixed_precision_optimizer", "MixedPrecisionOptimizer"), ("master_weights", "Master"), ("optim", "AdamW"),
    ("graph_report", "GraphReport"), ("report", "Report"), ("backend", "amp_graph"), ("policy", "Policy"),
]  # fmt: skip


class _Before(pickle._Pickler):
    """Pickles as before the move: with the paths that modules had."""

    def save_global(self, obj, name=None):
        module = getattr(obj, "__module__", None)
        if module not in OLD:
            return super().save_global(obj, name)
        self.write(pickle.GLOBAL + f"{OLD[module]}\n{name or obj.__qualname__}\n".encode())
        self.memoize(obj)
        return None

    dispatch = {**pickle._Pickler.dispatch, type(mse_loss): save_global, type: save_global}  # noqa: RUF012


def pickled_before(thing):
    import io

    out = io.BytesIO()
    _Before(out, protocol=2).dump(thing)
    return out.getvalue()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def step_of(policy):
    model = net()
    step = amp_graph.TrainStep(model, mse_loss, torch.optim.AdamW(model.parameters()), policy)
    step(X, torch.zeros(4, 2))
    return step


def globals_in(data):
    return {arg.split(" ")[0] for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}


@pytest.mark.parametrize("policy", ["bf16", "fp16-O2"])
def test_a_converted_model_loads(policy):
    model = amp_graph.convert(net(), policy)
    data = pickled_before(model)
    assert "amp_graph.conversion" in globals_in(data)
    loaded = pickle.loads(data)
    assert torch.equal(loaded(X), model(X))


def test_a_step_loads_and_goes_on():
    step = step_of("fp16")
    data = pickled_before(step)
    assert {"amp_graph.train_step", "amp_graph.loss_scale"} <= globals_in(data)
    loaded = pickle.loads(data)
    assert torch.equal(loaded(X, torch.zeros(4, 2)), step(X, torch.zeros(4, 2)))
    assert type(loaded) is amp_graph.TrainStep


def test_scalers_and_optimizers_load():
    scaler = amp_graph.GradScaler("cpu", init_scale=8.0)
    loaded = pickle.loads(pickled_before(scaler))
    assert loaded.state_dict() == scaler.state_dict()
    optimizer = pickle.loads(pickled_before(amp_graph.optim.AdamW(net().parameters(), 1e-3)))
    assert type(optimizer) is amp_graph.optim.AdamW


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_the_old_path_is_the_same_object(module, name):
    old = getattr(importlib.import_module(f"amp_graph.{module}"), name)
    home = HOMES.get(module) or {"optim": "optim.optimizers", "report": "report.model_report"}.get(module, module)
    assert old is getattr(importlib.import_module(f"amp_graph.{home}"), name)


def test_importing_the_package_imports_none_of_them():
    code = "import sys, inspect, amp_graph; inspect.getmodule(object()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_home_is_a_module():
    for name, home in HOMES.items():
        assert importlib.import_module(f"amp_graph.{home}").__name__ == f"amp_graph.{home}", name
    with pytest.raises(AttributeError):
        _ = sys.modules["amp_graph.conversion"].nothing
