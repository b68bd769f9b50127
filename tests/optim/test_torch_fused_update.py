"""A group's update in blocks of torch's fused kernels has the bits of torch's optimizer, whatever the sizes."""

import copy

import pytest
import torch

from amp_graph.optim import torch_fused_update
from amp_graph.optim.torch_fused_update import group_updates

RULES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
}
SHAPES = ((), (0,), (5,), (64,), (65, 3), (3, 8, 5, 5), (1000,), (7,))


def parameters():
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in SHAPES]
    made[5] = made[5].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(p) for p in made]


def updated(rule, low, block, monkeypatch, steps=3, bad=()):
    """Return parameters and state after updates in blocks, and those of torch's optimizer."""
    monkeypatch.setattr(torch_fused_update, "BLOCK", block)
    kind, options = RULES[rule]
    ours, theirs = parameters(), parameters()
    optimizer, reference = kind(ours, **options), kind(theirs, **options, fused=True)
    (update,) = group_updates(optimizer, ours)
    rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    for step in range(steps):
        grads = [torch.randn_like(p).to(low) for p in ours]
        found_inf = torch.tensor(float(step in bad)) if bad else None
        with torch.no_grad():
            update.apply(ours, grads, copy.copy(update.states), rate, found_inf)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.float()
        if step not in bad:
            reference.step()
    return _kept(ours, optimizer), _kept(theirs, reference)


def _kept(params, optimizer):
    return [t for p in params for t in (p, *(optimizer.state[p][name] for name in sorted(optimizer.state[p])))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 64, 1 << 19])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_have_the_bits_of_torchs_optimizer(rule, block, low, monkeypatch):
    ours, theirs = updated(rule, low, block, monkeypatch)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("rule", ["SGD, momentum", "AdamW", "Adagrad"])
def test_a_bad_step_changes_no_block(rule, monkeypatch):
    assert all(map(torch.equal, *updated(rule, torch.bfloat16, 64, monkeypatch, bad=(1,))))


def test_control_blocks_that_cut_a_kernels_vector_differ(monkeypatch):
    ours, theirs = updated("AdamW", torch.bfloat16, 1, monkeypatch)
    assert not all(map(torch.equal, ours, theirs))
