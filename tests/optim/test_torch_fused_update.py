"""A group's update in blocks of torch's fused kernels has the bits of torch's optimizer, whatever the sizes."""

import copy
import dataclasses

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
BY_VECTORS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="its kernels round all elements alike"
)
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


@BY_VECTORS
def test_control_blocks_that_cut_a_kernels_vector_differ(monkeypatch):
    ours, theirs = updated("AdamW", torch.bfloat16, 1, monkeypatch)
    assert not all(map(torch.equal, ours, theirs))


def _whole_and_in_shards(rule, ranks, dtype, low):
    """Return a parameter and its state after updates of the whole, and after updates of each rank's rows."""
    kind, options = RULES[rule]
    runs, steps = [], 3
    for rows, columns in ((1, 1), (3, 5), (7, 33), (33, 7), (2, 24), (61, 3), (130, 1)):
        torch.manual_seed(0)
        start = torch.randn(rows, columns, dtype=dtype)
        grads = [torch.randn(rows, columns).to(low) for _ in range(steps)]
        own = -(-rows // ranks)
        shards = [(min(own * rank, rows), min(own * (rank + 1), rows)) for rank in range(ranks)]
        kept = []
        for cuts in ([(0, rows)], shards):
            parts = []
            for first, last in cuts:
                parameter = torch.nn.Parameter(start[first:last].clone())
                optimizer = kind([parameter], **options)
                (update,) = group_updates(optimizer, [parameter])
                place = torch_fused_update.Place(first * columns, rows * columns) if cuts is shards else None
                update = dataclasses.replace(update, places=(place,))
                rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
                for grad in grads:
                    with torch.no_grad():
                        update.apply([parameter], [grad[first:last]], copy.copy(update.states), rate, None)
                parts.append([t for t in _kept([parameter], optimizer) if t.dim()])
            kept.append([torch.cat(kinds) for kinds in zip(*parts, strict=True)])
        runs.append(kept)
    return runs


@pytest.mark.parametrize(
    ("dtype", "low"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.float64,) * 2]
)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_shards_that_know_their_places_have_the_bits_of_the_whole(rule, ranks, dtype, low):
    for whole, in_shards in _whole_and_in_shards(rule, ranks, dtype, low):
        assert all(map(torch.equal, whole, in_shards))


@BY_VECTORS
def test_control_shards_that_end_as_a_whole_does_differ(monkeypatch):
    monkeypatch.setattr(torch_fused_update.Place, "ends", lambda *_: [])
    runs = _whole_and_in_shards("AdamW", 2, torch.float32, torch.float32)
    assert not all(torch.equal(*pair) for run in runs for pair in zip(*run, strict=True))
