"""transformers' Trainer: training with the callback is the loop written by hand, and a resumed one the whole one."""

import os

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, PolicyError
from tests.integrations import training

pytestmark = pytest.mark.needs("transformers", "accelerate")
STEPS = 50


@pytest.fixture(autouse=True)
def _alone():
    """Let no Trainer see the state that accelerate keeps of another."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def gpt2(dtype=None, **options):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    how = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16, **drops, **options}
    return GPT2LMHeadModel(GPT2Config(**how)).to(dtype)


def rows(steps=STEPS, batch=4):
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (steps * batch, 12), generator=made)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(model, folder, data=None, *callbacks, evaluated=None, **options):
    from transformers import Trainer, TrainingArguments

    how = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "use_cpu": True, **options}
    how = {"report_to": "none", "logging_steps": 10, "disable_tqdm": True, "save_strategy": "no", **how}
    arguments = TrainingArguments(str(folder), train_sampling_strategy="sequential", **how)
    return Trainer(model, arguments, train_dataset=data or rows(), eval_dataset=evaluated, callbacks=[*callbacks])


def callback(*args, **options):
    from amp_graph.integrations.transformers import AmpGraphCallback

    return AmpGraphCallback(*args, **options)


def by_hand(model, policy, data, scaler=None, accumulate=1, clip=1.0, steps=STEPS):
    """Train as the Trainer does: AdamW, a linear schedule, clipping by norm."""
    amp_graph.convert(model, policy)
    model.train()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    batches = [{k: torch.stack([row[k] for row in data[i : i + 4]]) for k in data[0]} for i in range(0, len(data), 4)]
    for i, batch in enumerate(batches):
        count = batch["labels"].numel() * accumulate  # as the Trainer counts for a GPT-2 without a loss type
        loss = model(**batch, num_items_in_batch=count).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (i + 1) % accumulate:
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        schedule.step()
        optimizer.zero_grad()
    return training.weights(amp_graph.revert(model))


def groups(model):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    bare = {n for n, _ in named if "bias" in n or "ln" in n}
    return [{"params": [p for n, p in named if (n in bare) is on], "weight_decay": 0.0} for on in (False, True)]


@pytest.mark.parametrize("policy", ["bf16", "bf16-O2", "fp16"])
def test_fifty_steps_are_those_of_the_loop_by_hand(policy, tmp_path):
    scaler = training.scaler_of(policy)
    expected = by_hand(gpt2(), policy, rows(), scaler)
    found = gpt2()
    given = [callback(policy)]
    one = trainer(found, tmp_path, None, *(given if policy != "fp16" else []))
    if policy == "fp16":
        given[0].add_to(one)
    one.train()
    training.assert_same(training.weights(found), expected)
    assert conversion_of(found) is None
    entry = next(e for e in one.state.log_history if "loss" in e)
    assert entry["casts"] > 0
    assert ("loss_scale" in entry, "skipped_steps" in entry) == (policy == "fp16",) * 2


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_resumed_run_equals_the_uninterrupted_one(policy, tmp_path):
    def run(folder, resumed=None, steps=20):
        model, given = gpt2(), callback(policy, scaler=training.growing(policy))
        one = trainer(model, tmp_path / folder, save_strategy="steps", save_steps=10, max_steps=steps)
        given.add_to(one)
        one.train(resume_from_checkpoint=resumed)
        return model, given

    whole, first = run("whole")
    again, second = run("again", str(tmp_path / "whole" / "checkpoint-10"))
    training.assert_same(training.weights(again), training.weights(whole))
    if policy == "fp16":
        assert first.scaler.state_dict() == second.scaler.state_dict()
        assert second.scaler.get_scale() == 2.0**12, "it grew before and after"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("policy", ["bf16,widen=true", "bf16-O2,widen=true", "fp16-O2,widen=true"])
def test_a_model_that_comes_in_bf16_resumes_exactly(policy, many, tmp_path, monkeypatch, request):
    if many:  # as under torchrun: DDP writes the values that it broadcasts over those that were loaded
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        monkeypatch.setenv("LOCAL_RANK", "0")
        request.addfinalizer(torch.distributed.destroy_process_group)

    def run(folder, resumed=None):
        model, given = gpt2(torch.bfloat16), callback(policy, scaler=training.growing(policy))
        one = trainer(model, tmp_path / folder, save_strategy="steps", save_steps=4, max_steps=8)
        given.add_to(one)
        one.train(resume_from_checkpoint=resumed)
        assert conversion_of(model) is None
        saved = sorted((tmp_path / folder / "checkpoint-8").glob("*.safetensors"))
        return model, load_file(saved[0]), torch.load(tmp_path / folder / "checkpoint-8" / "optimizer.pt")["state"]

    from safetensors.torch import load_file

    whole, saved, state = run("whole")
    again, found, theirs = run("again", str(tmp_path / "whole" / "checkpoint-4"))
    assert {t.dtype for t in saved.values()} == {torch.float32}
    training.assert_same(found, saved)
    training.assert_same(training.weights(again), training.weights(whole))
    assert all(torch.equal(theirs[i][k], v) for i, kinds in state.items() for k, v in kinds.items())


def test_a_checkpoint_that_the_trainer_rounded_is_warned_of(tmp_path):
    first = trainer(gpt2(torch.bfloat16), tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    callback("bf16,widen=true").add_to(first)
    first.train()
    second = trainer(gpt2(torch.bfloat16), tmp_path, None, callback("bf16,widen=true"), max_steps=4)
    with pytest.warns(AmpGraphWarning, match=r"resumed at step 2.*rounded the checkpoint(?s:.*)fix:.*add_to"):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_gradients_accumulate(policy, tmp_path):
    data = rows(8)
    scaler = training.scaler_of(policy)
    expected = by_hand(gpt2(), policy, data, scaler, accumulate=4, steps=2)
    found = gpt2()
    one = trainer(found, tmp_path, data, gradient_accumulation_steps=4, max_steps=2)
    callback(policy).add_to(one)
    one.train()
    training.assert_same(training.weights(found), expected)


def test_checkpointing_and_evaluation_during_training(tmp_path):
    data, seen = rows(6), []
    plain, found = gpt2(), gpt2()
    found.register_forward_hook(lambda model, *_: seen.append((model.training, conversion_of(model) is not None)))
    results = []
    for model, on in ((plain, False), (found, True)):
        how = {"gradient_checkpointing": on, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}
        one = trainer(model, tmp_path, data, callback("bf16"), evaluated=data[:4], **how)
        one.train()
        results.append([entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry])
    assert {*seen} == {(True, True), (False, True)}
    assert len(results[0]) == 3
    assert results[0] == pytest.approx(results[1], rel=2e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_model_stays_converted_on_request_for_a_report(compiled, tmp_path):
    found = gpt2()
    how = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    one = trainer(found, tmp_path, None, callback("bf16", keep_converted=True), max_steps=1, **how)
    one.train()
    assert amp_graph.report(one.model).graphs[0].casts
    one.train()  # as before: one conversion, one that is kept
    assert conversion_of(found) is not None
    assert [e for e in one.state.log_history if e.get("casts")]


def test_metrics_reach_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is missing; fix: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one = trainer(gpt2(), tmp_path, rows(4), report_to="tensorboard", logging_steps=2, max_steps=4)
    callback("fp16").add_to(one)
    one.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {"train/loss_scale", "train/skipped_steps", "train/casts", "train/held_bytes"} <= {*events.Tags()["scalars"]}
    assert [e.step for e in events.Scalars("train/loss_scale")][:2] == [2, 4]


@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_the_trainers_own_autocast_is_refused(flag, tmp_path):
    found = gpt2()
    with pytest.raises(PolicyError, match=rf"TrainingArguments\({flag}=True\).*\n.*\n.*leave {flag}=True out"):
        trainer(found, tmp_path, None, callback("bf16"), max_steps=1, **{flag: True}).train()
    assert conversion_of(found) is None


def test_fp16_without_a_scaler_is_refused(tmp_path):
    with pytest.raises(PolicyError, match=r"has no scaler\n.*\n.*AmpGraphCallback\('fp16-O1'\).add_to\(trainer\)"):
        trainer(gpt2(), tmp_path, None, callback("fp16"), max_steps=1).train()


# -- FSDP2, on two ranks -------------------------------------------------------------------------------


def _sharded(rank, size, path, shards):
    """Train with the Trainer, whose model accelerate shards or replicates; keep losses, collectives, what it has."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    os.environ["LOCAL_RANK"] = str(rank)
    model, given = gpt2(), callback("bf16", keep_converted=True)
    one = trainer(model, f"{path}/{rank}-out", None, given, max_steps=6, logging_steps=1)
    if shards:
        plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap")
        plugin.transformer_cls_names_to_wrap, plugin.cpu_ram_efficient_loading = ["GPT2Block"], False
        training.as_fsdp2(one.accelerator, plugin)
        one.is_fsdp_enabled = True
    one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    told = amp_graph.report(model).to_dict()["collectives"]
    torch.save((losses, told, type(next(model.parameters())).__name__), f"{path}/{rank}")


def test_the_trainer_with_sharded_blocks_gathers_them_low(ranks, tmp_path):
    for ours, ddp in zip(*(ranks(_sharded, 2, tmp_path, shards) for shards in (True, False)), strict=True):
        assert len(ours[0]) == 6
        assert ours[0] == pytest.approx(ddp[0], rel=1e-3)
        assert (ours[2], ddp[2]) == ("DTensor", "Parameter")
        blocks = [row for row in ours[1] if row["direction"] == "gather" and ".h." in row["unit"]]
        assert [(row["dtype"], row["times"]) for row in blocks] == [("bf16 and f32", 2)] * len(blocks)
        assert blocks
        assert ddp[1] == []
