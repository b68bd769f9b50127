"""Several processes, on gloo: ranks agree on bad steps and stay equal bit for bit."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import amp_graph

STEPS, BAD = 40, {3, 4, 17, 30}


def _port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _train(rank, size, port, wrapped, agree, path):
    """Train on this rank's own data, with infinite gradients on one rank; keep what came out."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=torch.distributed.constants.default_pg_timeout)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    if wrapped == "before":
        model = amp_graph.convert(nn.parallel.DistributedDataParallel(model), "fp16")
    else:
        model = nn.parallel.DistributedDataParallel(amp_graph.convert(model, "fp16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = amp_graph.GradScaler("cpu", 2.0**6, growth_interval=5, process_group=None if agree else False)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step in BAD and rank == size - 1:  # behind the all-reduce: this rank alone sees it
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    kept = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    torch.save(([t.detach() for t in kept], scaler.state_dict()), f"{path}/{rank}")
    torch.distributed.destroy_process_group()


def run(tmp_path, size, wrapped="after", agree=True):
    mp.spawn(_train, (size, _port(), wrapped, agree, str(tmp_path)), nprocs=size)
    return [torch.load(tmp_path / str(rank)) for rank in range(size)]


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True)) and one[1] == two[1]


@pytest.mark.parametrize(("size", "wrapped"), [(2, "after"), (2, "before"), (4, "after")])
def test_one_ranks_infinite_gradient_skips_the_step_on_all(tmp_path, size, wrapped):
    first, *others = run(tmp_path, size, wrapped)
    assert all(equal(first, other) for other in others)
    assert first[1]["_skipped"] == len(BAD)
    assert first[0][0].isfinite().all()


def test_control_without_agreement_ranks_drift_apart(tmp_path):
    first, second = run(tmp_path, 2, agree=False)
    assert not equal(first, second)
