"""``TrainStep.grad_norm`` is what ``clip_grad_norm_`` returns in the loop by hand, however the step updates."""

import pytest
import torch

import amp_graph
from tests.step.test_train_step import batches, build, by_hand, with_step

WAYS = {
    "plain": {},
    "with a scale": {"policy": "fp16"},
    "micro-batches": {"micro_batches": 2},
    "by norm and value": {"clip_value": 0.01},
    "not traced": {"sizes": True},
    "behind the graph": {"optimizer": torch.optim.RMSprop},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_that_of_the_loop_by_hand(way):
    options = dict(WAYS[way])
    policy, kind, sizes = (
        options.pop(k, d) for k, d in (("policy", "bf16"), ("optimizer", torch.optim.SGD), ("sizes", False))
    )
    given = [b for n in range(4 if sizes else 1) for b in batches(2, (8 + 2 * n, 6))]
    *_, step = with_step(build(optimizer=kind), policy, clip_norm=0.1, **options)
    assert step.grad_norm is None
    other, theirs = build(optimizer=kind)
    scaler, norms = amp_graph.GradScaler("cpu", enabled=policy == "fp16"), []
    parts, value = options.get("micro_batches", 1), options.get("clip_value")
    for x, y in given:
        by_hand(other, theirs, policy, [(x, y)], scaler=scaler, clip=0.1, value=value, parts=parts, norms=norms)
        step(x, y)
        assert step.grad_norm.shape == ()
        assert step.grad_norm.item() == pytest.approx(norms[-1].item(), rel=1e-5)
        assert amp_graph.metrics(step)["grad_norm"] == step.grad_norm.item()


def test_an_infinite_gradient_has_an_infinite_norm():
    *_, step = with_step(build(), "fp16", clip_norm=1.0)
    x, y = next(batches(1))
    step(x * 1e38, y)
    assert not torch.isfinite(step.grad_norm)
    assert step.skipped_steps == 1


def test_without_clipping_there_is_none():
    *_, step = with_step(build(), "bf16", clip_value=1.0)
    step(*next(batches(1)))
    assert step.grad_norm is None
    assert "grad_norm" not in amp_graph.metrics(step)
