"""peft: adapters in fp32 over a base in bf16 train at O1, and what ``merge_and_unload`` returns is converted again."""

import pytest
import torch

import amp_graph
from tests.integrations import training
from tests.integrations.test_transformers import _alone, callback, gpt2, rows, trainer

pytestmark = pytest.mark.needs("peft", "transformers", "accelerate")
assert _alone  # a fixture


def adapted(dtype=torch.bfloat16):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(gpt2(dtype), config)


def first_batch():
    return {k: torch.stack([row[k] for row in rows(1)]) for k in ("input_ids", "labels")}


def trained(model, policy, steps=50):
    """Train the adapters by hand; return them, and the losses."""
    amp_graph.convert(model, policy) if policy else None
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data, losses = rows(steps), []
    for i in range(steps):
        batch = {k: torch.stack([row[k] for row in data[4 * i : 4 * i + 4]]) for k in data[0]}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}, losses


def test_fp32_adapters_over_a_bf16_base_train_at_o1():
    model = adapted()
    _, losses = trained(model, "bf16")
    _, exact = trained(adapted(torch.float32), None)
    assert losses == pytest.approx(exact, rel=5e-3)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, dict(adapted().named_parameters())[n]) for n, p in frozen.items())
    assert amp_graph.report(model).graphs[0].casts


def test_gradients_are_as_exact_as_under_autocast():
    exact, found, cast = adapted().double(), amp_graph.convert(adapted(), "bf16"), adapted()
    batch = first_batch()
    for model in (exact, found, cast):
        torch.manual_seed(0)
        for name, p in model.named_parameters():
            p.data = torch.randn(p.shape).to(p.dtype) * 0.05 if "lora" in name else p.data
        with torch.autocast("cpu", torch.bfloat16, enabled=model is cast):
            loss = model.train()(**batch).loss
        loss.backward()
    flat = [
        torch.cat([p.grad.flatten().double() for p in m.parameters() if p.requires_grad]) for m in (exact, found, cast)
    ]
    assert (flat[1] - flat[0]).norm() <= 1.1 * (flat[2] - flat[0]).norm()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_checkpoints_over_a_half_base_of_either_dtype_have_a_plan_and_the_gradients(policy, reentrant, capfd):
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        model = adapted(dtype)
        for name, p in model.named_parameters():
            p.data = torch.ones_like(p) * 0.05 if "lora_B" in name else p.data
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model = model if dtype is torch.float32 else amp_graph.convert(model, policy)
        out = model.train()(**first_batch())
        out.loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert (grads[1] - grads[0]).norm() <= 0.03 * grads[0].norm()  # the base is rounded to bf16 in one of them
    graphs = amp_graph.report(model).graphs
    assert not any(graph.unplanned for graph in graphs)
    assert any(graph.casts for graph in graphs)
    assert "Traceback" not in capfd.readouterr().err


def test_the_trainer_with_the_callback_is_the_loop_by_hand_and_resumes(tmp_path):
    def run(folder, resumed=None):
        model = adapted()
        one = trainer(
            model, tmp_path / folder, rows(20), callback("bf16"), max_steps=20, save_strategy="steps", save_steps=10
        )
        one.train(resume_from_checkpoint=resumed)
        return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    whole = run("whole")
    training.assert_same(run("again", str(tmp_path / "whole" / "checkpoint-10")), whole)


@pytest.mark.parametrize("name", ["merge_and_unload", "unload"])
def test_what_is_merged_is_converted_again(name):
    model = amp_graph.convert(adapted(), "bf16")
    model(**first_batch())
    merged = amp_graph.convert(getattr(amp_graph.revert(model), name)(), "bf16")
    merged(**first_batch())
    assert amp_graph.report(merged).graphs
