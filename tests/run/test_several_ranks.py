"""``amp-graph run --policy fp16`` over two ranks: replicas stay equal where gradients overflow on one rank only."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from amp_graph.run.several_ranks import are_finite, spread_overflow, unscaled_on_arrival

RANKS = """
import json, torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
OPTIONS = {
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


def backwards(kind, model, overflows):
    count = 3 if kind == "no_sync" else 1
    for i in range(count):
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        # a gradient of 2^16 overflows in fp16 when it is scaled, and is none of an fp32 training's worries
        loss = (model(x) - y).square().mean() * (2.0**16 if overflows and i == 0 and rank == 1 else 1.0)
        if i < count - 1:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()


def train(kind):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    hand, params = kind.startswith("hand"), [*plain.parameters()]
    model = plain if hand else DistributedDataParallel(plain, **OPTIONS.get(kind, {}))
    if kind == "compressed":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    torch.manual_seed(rank)
    history = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=kind != "view")
        backwards(kind, model, step == 4)
        if kind == "hand, clipped first":
            torch.nn.utils.clip_grad_value_(params, 0.5)
        for p in params if hand else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if kind == "clipped":
            torch.nn.utils.clip_grad_value_(params, 0.5)
        if kind == "hook" and step == 5 and rank == 0:  # from now on, one rank cannot scale
            plain[2].weight.register_hook(lambda grad: grad.clone())
        before = [p.detach().clone() for p in params]
        optimizer.step()
        moved = not all(map(torch.equal, before, params))
        weights, grads = (torch.cat([x.flatten() for x in found]) for found in (params, [p.grad for p in params]))
        history.append((moved, weights.double().norm().item(), grads.norm().item()))
    return type(plain.forward).__name__, history


DDP = ("ddp", "no_sync", "unused", "view", "static", "compressed", "clipped")
KINDS = (*DDP, "hand", "hand, clipped first", "hook")
found = {kind: train(kind) for kind in KINDS}
with open(f"rank{rank}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


def ranks(folder, *launcher):
    """Train in two processes; return what each found, and what was printed to stderr."""
    (folder / "ranks.py").write_text(RANKS)
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *launcher, "ranks.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    return [json.loads((folder / f"rank{i}.json").read_text()) for i in range(2)], found.stderr


@pytest.mark.slow
def test_ranks_agree_on_the_step_that_one_of_them_would_skip(tmp_path):
    """By DDP with its options, and without DDP; the last one scales on one rank only from its sixth step on."""
    (plain, _), _ = ranks(tmp_path)
    (first, second), errors = ranks(tmp_path, "-m", "amp_graph", "run", "--policy", "fp16")
    assert "10 optimizer steps skipped" in errors, errors
    for kind, (forward, history) in first.items():
        other, theirs = second[kind]
        assert [step[:2] for step in history] == [step[:2] for step in theirs], kind
        assert [step[0] for step in history] == [step != 4 for step in range(8)], kind
        assert (forward, other) == ("Conversion" if kind != "hook" else "method", "Conversion"), errors
        for one, exact in zip(history[:4], plain[kind][1][:4], strict=True):
            assert one[1:] == pytest.approx(exact[1:], rel=2e-2), f"{kind}: before the overflow, as in fp32"
        assert 0.5 < history[7][2] / plain[kind][1][7][2] < 2, f"{kind}: gradients are unscaled"


def test_gradients_are_unscaled_before_they_are_accumulated():
    """What DDP averages is the leaf's gradient as it is accumulated: it is seen unscaled there."""
    weight, seen = nn.Parameter(torch.ones(4)), []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        with unscaled_on_arrival([weight], torch.tensor(2.0**-16)):
            (weight * 3).sum().backward(torch.tensor(2.0**16))
    assert [grad.tolist() for grad in seen] == [[3.0] * 4, [6.0] * 4]
    assert not weight._backward_hooks


def test_an_overflow_outlives_clipping():
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    weight.grad, other.grad = torch.tensor([1.0, torch.inf, 2.0, 3.0]), torch.ones(2)
    assert not are_finite([weight, other])
    spread_overflow([weight])
    nn.utils.clip_grad_value_([weight], 1.0)
    assert not are_finite([weight, other])
    assert are_finite([other, nn.Parameter(torch.ones(1))])
