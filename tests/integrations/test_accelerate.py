"""accelerate: the usual loop with ``prepare`` is the one written by hand, saved state included."""

import pytest
import torch
from torch.nn import functional as F

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import PolicyError, ScaleError
from tests.integrations import training
from tests.integrations.test_transformers import _alone

pytestmark = pytest.mark.needs("accelerate")
assert _alone  # a fixture


def begin(policy, model, scaler=None, optimizer=training.adamw, **options):
    from accelerate import Accelerator

    from amp_graph.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, **options)
    return accelerator, *prepare(accelerator, model, optimizer(model.parameters()), policy=policy, scaler=scaler)


def loop(accelerator, model, optimizer, data, clip=None):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("policy", ["bf16", "bf16-O2", "fp16", "fp16-O2"])
def test_fifty_steps_are_those_of_the_loop_by_hand(policy, clip):
    clip = None if policy == "bf16-O2" else clip
    data = training.batches()
    scalers = [training.growing(policy) for _ in range(2)]
    expected, _ = training.train(training.net(), policy, data, clip_norm=clip, scaler=scalers[0])
    found = training.net()
    loop(*begin(policy, found, scalers[1]), data, clip)
    training.assert_same(training.weights(amp_graph.revert(found)), expected)
    if scalers[0] is not None:
        assert scalers[1].state_dict() == scalers[0].state_dict()


def test_gradients_accumulate_and_bad_steps_are_skipped():
    data = training.batches(12)
    data[5] = (torch.full_like(data[5][0], 1e38), data[5][1])
    scaler = amp_graph.GradScaler()
    expected, _ = training.train(training.net(), "fp16", data, scaler=scaler, accumulate=4, clip_norm=1.0)
    found = training.net()
    accelerator, model, optimizer = begin("fp16", found, gradient_accumulation_steps=4)
    loop(accelerator, model, optimizer, data, 1.0)
    training.assert_same(training.weights(amp_graph.revert(found)), expected)
    assert accelerator.scaler.skipped_steps == scaler.skipped_steps == 1


@pytest.mark.parametrize("policy", ["bf16-O2", "fp16"])
def test_a_resumed_run_equals_the_uninterrupted_one(policy, tmp_path):
    data, whole = training.batches(20), training.net()
    accelerator, model, optimizer = begin(policy, whole, training.growing(policy))
    loop(accelerator, model, optimizer, data[:10])
    accelerator.save_state(str(tmp_path))
    loop(accelerator, model, optimizer, data[10:])
    again = training.net()
    resumed, model, optimizer = begin(policy, again, training.growing(policy))
    resumed.load_state(str(tmp_path))
    loop(resumed, model, optimizer, data[10:])
    training.assert_same(training.weights(again), training.weights(whole))
    if policy == "fp16":
        assert resumed.scaler.state_dict() == accelerator.scaler.state_dict()


def test_a_step_as_one_graph_takes_the_wrapped_optimizer():
    from accelerate import Accelerator

    data = training.batches(5)
    losses = []
    for wrapped in (False, True):
        model = training.net()
        optimizer = training.adamw(model.parameters())
        optimizer = Accelerator(cpu=True).prepare(optimizer) if wrapped else optimizer
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "fp16")
        losses.append([step(*batch).item() for batch in data])
    assert losses[0] == losses[1]


def test_what_cannot_work_is_refused():
    from accelerate import Accelerator

    from amp_graph.integrations.accelerate import prepare

    accelerator, *_ = begin("fp16", training.net())
    with pytest.raises(ScaleError, match="has a scaler already"):
        prepare(accelerator, model := training.net(), policy="fp16", scaler=amp_graph.GradScaler())
    assert conversion_of(model) is None
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    with pytest.raises(PolicyError, match=r"mixed_precision='bf16'\).*\n.*\n.*prepare\(Accelerator\(\)"):
        prepare(Accelerator(cpu=True, mixed_precision="bf16"), training.net(), policy="bf16")


# -- FSDP2, on two ranks -------------------------------------------------------------------------------


def _sharded(rank, size, path, policy, with_accelerate):
    """Train a model that accelerate shards and converts, or the loop by hand; keep losses, weights, collectives."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import fully_shard

    from amp_graph.integrations.accelerate import prepare

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(3)))
    scaler = amp_graph.GradScaler(growth_interval=8, init_scale=2.0**10, enabled=policy == "fp16")
    if with_accelerate:
        AcceleratorState._reset_state(True)
        plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap")
        plugin.transformer_cls_names_to_wrap, plugin.cpu_ram_efficient_loading = ["Sequential"], False
        accelerator = training.as_fsdp2(Accelerator(cpu=True), plugin)
        given = scaler if policy == "fp16" else None
        model, optimizer = prepare(accelerator, model, training.adamw(model.parameters()), policy=policy, scaler=given)
    else:
        for part in (*amp_graph.convert(model, policy), model):
            fully_shard(part)
        optimizer = training.adamw(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for i in range(8):
        x = torch.randn(8, 16, generator=generator) * (1e38 if i == 5 and rank and policy == "fp16" else 1.0)
        loss = model(x).square().mean()
        if with_accelerate:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if with_accelerate:
        before = [p.to_local().clone() for p in model.parameters()]
        accelerator.save_state(path + "/state")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        accelerator.load_state(path + "/state")
        assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    weights = [p.full_tensor().detach() for p in model.parameters()]
    told = amp_graph.report(model).to_dict()["collectives"]
    torch.save((losses[:5], weights, int(scaler.skipped_steps), told), f"{path}/{rank}")


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_model_that_accelerate_shards_trains_as_the_loop_by_hand(ranks, tmp_path, policy):
    for found, expected in zip(*(ranks(_sharded, 2, tmp_path, policy, how) for how in (True, False)), strict=True):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))
        assert found[2] == (policy == "fp16")
        assert found[3] == expected[3]
        low = [row for row in found[3] if row["direction"] == "gather" and row["unit"]]
        assert [row["dtype"] for row in low] == [policy.replace("fp", "f")] * 3
