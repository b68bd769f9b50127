"""Lightning: training with the plugin is the loop written by hand, and a resumed one the uninterrupted one."""

import copy
import importlib

import pytest
import torch
from torch.nn import functional as F

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError, PolicyError, ScaleError
from tests.integrations import training

pytestmark = pytest.mark.needs("lightning")
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}
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


def trained_as_by_hand(policy, data, found=None, by_hand=None, **options):
    """Train a module with the plugin, and compare it with the loop by hand; return it, and the latter's losses."""
    found = found or module()
    expected, losses = training.train(
        training.net(), policy, data, **{"scaler": training.scaler_of(policy), **(by_hand or {})}
    )
    trainer(policy, **options).fit(found, loader(data))
    training.assert_same(training.weights(found.net), expected)
    return found, losses


@pytest.mark.parametrize("own_forward", [False, True], ids=["self.net(x)", "self(x)"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fifty_steps_are_those_of_the_loop_by_hand(policy, own_forward):
    found, losses = trained_as_by_hand(policy, training.batches(), module(own_forward))
    assert found.losses == losses
    assert all(p.dtype is torch.float32 and conversion_of(m) is None for m in found.modules() for p in m.parameters())


@pytest.mark.parametrize(("clip", "how"), [(0.05, "norm"), (0.003, "value")])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16-O2"])
def test_gradients_are_clipped_without_their_scale(policy, clip, how):
    data, options = training.batches(), {"gradient_clip_val": clip, "gradient_clip_algorithm": how}
    found, _ = trained_as_by_hand(policy, data, by_hand={f"clip_{how}": clip}, **options)
    free, _ = training.train(training.net(), policy, data, scaler=training.scaler_of(policy))
    assert any(not torch.equal(free[name], value) for name, value in training.weights(found.net).items()), "it clips"


def by_step(data):
    """Return a module that takes its batches by the global step: Lightning 2.6 resumes an epoch with its first one."""
    found = module()
    step = found.training_step
    found.training_step = lambda batch, batch_idx: step(data[found.trainer.global_step], batch_idx)
    return found


@pytest.mark.parametrize("policy", ["bf16", "bf16-O2", "fp16", "fp16-O2"])
def test_a_resumed_run_equals_the_uninterrupted_one(policy, tmp_path):
    data = training.batches()
    scaler = [training.growing(policy, 7) for _ in range(3)]
    expected, _ = training.train(training.net(), policy, data, scaler=scaler[0])
    first = trainer(policy, max_steps=20, plugins=plugin(policy, scaler=scaler[1]))
    first.fit(by_step(data), loader(data))
    first.save_checkpoint(tmp_path / "half.ckpt")
    again = by_step(data)
    rest = trainer(policy, plugins=plugin(policy, scaler=scaler[2]))
    rest.fit(again, loader(data), ckpt_path=tmp_path / "half.ckpt")
    assert len(again.losses) == 30
    training.assert_same(training.weights(again.net), expected)
    if scaler[0] is not None:
        assert scaler[2].state_dict() == scaler[0].state_dict()
        assert scaler[2].get_scale() > 2.0**15, "it grew"


def test_gradients_accumulate_over_batches():
    by_hand = {"accumulate": 4}
    trained_as_by_hand("fp16", training.batches(48), by_hand=by_hand, accumulate_grad_batches=4, max_steps=12)


def test_torchs_own_scaler_and_fused_optimizers_serve_as_well():
    by_hand = {"scaler": torch.amp.GradScaler("cpu"), "optimizer": fused, "clip_norm": 0.05}
    given = plugin("fp16", scaler=torch.amp.GradScaler("cpu"))
    trained_as_by_hand("fp16", training.batches(), module(fused=True), by_hand, plugins=given, gradient_clip_val=0.05)


def fused(params):
    return training.adamw(params, fused=True)


def test_a_step_with_an_infinite_gradient_is_skipped_and_counted():
    data = training.batches(6)
    data[2] = (torch.full_like(data[2][0], 1e38), data[2][1])
    found = module()
    one = trainer("fp16", max_steps=6)
    given = one.precision_plugin
    seen = {}
    found.on_train_end = lambda: seen.update(given.metrics())
    one.fit(found, loader(data))
    expected, _ = training.train(training.net(), "fp16", data, scaler=amp_graph.GradScaler())
    training.assert_same(training.weights(found.net), expected)
    assert seen["skipped_steps"] == 1
    assert seen["loss_scale"] == 2.0**15
    assert seen["casts"] > 0


def test_validation_and_test_run_converted_and_everything_is_reverted():
    data = training.batches(8)
    found, seen = module(), []
    found.net.register_forward_hook(lambda net, *_: seen.append((found.trainer.state.fn, net.training, is_low(net))))
    one = trainer("bf16", max_steps=4, val_check_interval=4, num_sanity_val_steps=1)
    one.fit(found, loader(data), loader(data[:1]))
    one.test(found, loader(data[:1]), verbose=False)
    assert seen[0] == ("fit", False, False), "the sanity check comes before what a training step calls is known"
    assert {*seen[1:]} == {("fit", True, True), ("fit", False, True), ("test", False, True)}
    assert not is_low(found.net)
    assert copy.deepcopy(found.net)(data[0][0]).dtype is torch.float32


def is_low(net):
    return conversion_of(net) is not None


def test_modules_stay_converted_on_request_for_a_report():
    found = module()
    trainer("bf16", plugins=plugin("bf16", keep_converted=True), max_steps=2).fit(found, loader(training.batches(2)))
    assert amp_graph.report(found.net).graphs[0].casts


def gan():
    """Return a module with two optimizers that it steps itself; its second net is first called after two batches."""

    class Gan(lightning().LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = training.net(), training.net()
            self.norms = []

        def training_step(self, batch, index):
            first, second = self.optimizers()
            x, y = batch
            self.stepped(first, F.cross_entropy(self.maker(x), y))
            if index >= 2:
                self.stepped(second, F.cross_entropy(self.judge(x), y))

        def stepped(self, optimizer, loss):
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self):
            return training.adamw(self.maker.parameters()), training.adamw(self.judge.parameters())

    return Gan()


@pytest.mark.parametrize("policy", ["fp16", "bf16-O2"])
def test_manual_optimization_of_two_nets(policy):
    data = training.batches(10)
    scaler = [training.scaler_of(policy) for _ in range(2)]
    maker, _ = training.train(training.net(), policy, data, scaler=scaler[0], clip_norm=0.05)
    found = gan()
    trainer(policy, max_steps=18).fit(found, loader(data))
    judge, _ = training.train(training.net(), policy, data[2:], scaler=scaler[1], clip_norm=0.05)
    if policy == "fp16":
        training.assert_same(training.weights(found.maker), maker)
        training.assert_same(training.weights(found.judge), judge)
    else:  # by hand the norm is of gradients in bf16
        assert all(v.isfinite().all() for v in found.state_dict().values())


def test_ddp_trains_the_converted_module():
    data = training.batches(10)
    expected, _ = training.train(training.net(), "fp16", data, scaler=amp_graph.GradScaler())
    found = module()
    try:
        trainer("fp16", strategy="ddp", max_steps=10, use_distributed_sampler=False).fit(found, loader(data))
        training.assert_same(training.weights(found.net), expected)
        with pytest.raises(
            CaptureError, match=r"DistributedDataParallel has built its buckets.*\n.*\n.*configure_model"
        ):
            trainer("bf16-O2", strategy="ddp", max_steps=1).fit(module(), loader(data))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_the_other_name_of_the_package():
    pl = pytest.importorskip(
        "pytorch_lightning", reason="pytorch_lightning is missing; fix: pip install pytorch-lightning"
    )
    given = plugin("bf16", name="pytorch_lightning")
    trained_as_by_hand("bf16", training.batches(5), module(pl=pl), pl=pl, plugins=given, max_steps=5)


def test_metrics_reach_tensorboard_once_per_interval(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from amp_graph.integrations.lightning import AmpGraphMetrics

    logger = importlib.import_module("lightning.pytorch.loggers").TensorBoardLogger(tmp_path)
    one = trainer(
        "fp16", max_steps=6, logger=logger, log_every_n_steps=3, callbacks=[AmpGraphMetrics()], gradient_clip_val=0.5
    )
    one.fit(module(), loader(training.batches(6)))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    names = {tag.removeprefix("amp_graph/") for tag in events.Tags()["scalars"] if tag.startswith("amp_graph/")}
    assert names == {"loss_scale", "skipped_steps", "skipped_of_last_100", "casts", "held_bytes", "grad_norm"}
    assert [e.step for e in events.Scalars("amp_graph/loss_scale")] == [3, 6]


def test_what_cannot_work_is_one_error_before_training():
    data = training.batches(2)
    with pytest.raises(PolicyError, match="unknown word 'bf61'"):
        plugin("bf61")
    with pytest.raises(PolicyError, match="whose gradients need no scale"):
        trainer("bf16", plugins=plugin("bf16", scaler=amp_graph.GradScaler())).fit(module(), loader(data))
    for policy in ("fp16", "bf16-O2"):
        found = module()
        found.configure_optimizers = lambda found=found: torch.optim.LBFGS(found.parameters())
        with pytest.raises(ScaleError, match="LBFGS calls its closure several times"):
            trainer(policy).fit(found, loader(data))
        assert not is_low(found.net)


def test_lbfgs_at_o1_and_a_step_that_is_left_out():
    found = module()
    found.configure_optimizers = lambda: torch.optim.LBFGS(found.parameters(), lr=0.1, max_iter=3)
    trainer("bf16", max_steps=2).fit(found, loader(training.batches(2)))
    assert len(found.losses) == 6
    skips = module()
    skips.training_step = lambda batch, batch_idx: None
    before = training.weights(skips.net)
    trainer("fp16", max_steps=2).fit(skips, loader(training.batches(2)))
    training.assert_same(training.weights(skips.net), before)


def test_code_outside_of_modules_runs_in_fp32():
    seen = []

    def step(batch, batch_idx):
        seen.append(F.linear(batch[0], found.net[0].weight).dtype)
        return F.cross_entropy(found.net(batch[0]), batch[1])

    found = module()
    found.training_step = step
    trainer("bf16", max_steps=1).fit(found, loader(training.batches(1)))
    assert seen == [torch.float32]
