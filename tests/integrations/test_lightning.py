"""Lightning: training with the plugin is the loop written by hand, and a resumed one the uninterrupted one."""

import importlib

import pytest
import torch
from torch.nn import functional as F

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError, PolicyError, ScaleError
from tests.integrations import training

pytestmark = pytest.mark.needs("lightning")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
POLICIES = ["bf16", "bf16-O2", "fp16", "fp16-O2", "O0"]


def lightning(name="lightning.pytorch"):
    return importlib.import_module(name)


def plugin(*args, name="lightning", **options):
    return importlib.import_module(f"amp_graph.integrations.{name}").AmpGraphPrecision(*args, **options)


def module(own_forward=False, pl=None, **options):
    """Return a LightningModule whose step calls ``self.net(x)``, or ``self(x)``."""

    class Classifier((pl or lightning()).LightningModule):
        def __init__(self):
            super().__init__()
            self.net = training.net()
            self.losses = []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self(x) if own_forward else self.net(x), y)
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

        def test_step(self, batch, index):
            self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return training.adamw(self.parameters(), **options)

    return Classifier()


def trainer(policy, pl=None, **options):
    steps = options.pop("max_steps", training.STEPS)
    given = options.pop("plugins", None) or plugin(policy)
    how = {**QUIET, "enable_checkpointing": False, "max_steps": steps, **options}
    return (pl or lightning()).Trainer(plugins=given, **how)


def loader(data):
    return torch.utils.data.DataLoader(data, batch_size=None)


def scaler_of(policy):
    return amp_graph.GradScaler() if policy.startswith("fp16") else None


@pytest.mark.parametrize("own_forward", [False, True], ids=["self.net(x)", "self(x)"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fifty_steps_are_those_of_the_loop_by_hand(policy, own_forward):
    data = training.batches()
    expected, losses = training.train(training.net(), policy, data, scaler=scaler_of(policy))
    found = module(own_forward)
    trainer(policy).fit(found, loader(data))
    training.assert_same(training.weights(found.net), expected)
    assert found.losses == losses
    assert all(p.dtype is torch.float32 and conversion_of(m) is None for m in found.modules() for p in m.parameters())


@pytest.mark.parametrize(("clip", "how"), [(0.05, "norm"), (0.003, "value")])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16-O2"])
def test_gradients_are_clipped_without_their_scale(policy, clip, how):
    data = training.batches()
    expected, _ = training.train(training.net(), policy, data, scaler=scaler_of(policy), **{f"clip_{how}": clip})
    found = module()
    trainer(policy, gradient_clip_val=clip, gradient_clip_algorithm=how).fit(found, loader(data))
    training.assert_same(training.weights(found.net), expected)
    free, _ = training.train(training.net(), policy, data, scaler=scaler_of(policy))
    assert any(not torch.equal(free[name], expected[name]) for name in free), "it clips"
