"""Recorded calls in two processes: DistributedDataParallel's hooks run after each recorded backward."""

import contextlib
import gc
import os
import re
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.replay import eligibility, recorder
from tests.layers import layers
from tests.replay.stand_in import StandIn

STEPS = 8
WIDTH = 512  # a layer is a bucket of DDP, the first of which has 1 MiB at least


@layers(
    lambda: dict(
        layers=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        last=nn.Linear(WIDTH, 4),
    )
)
def Net(self, x):
    """Layers of a bucket each, with a batch norm, whose statistics DDP broadcasts."""
    return self.last(torch.relu(self.layers(x)))


@layers(lambda: dict(body=nn.Linear(8, 8), one=nn.Linear(8, 2), two=nn.Linear(8, 2)))
def TwoHeads(self, x, which):
    """DDP has to find the parameters that a step leaves out."""
    return (self.one if which else self.two)(self.body(x).relu())


def steps(ddp, model, rank, every=1, more=0):
    """Train; with ``more`` the ranks have other sizes, and record at different steps."""
    found, sizes = [], (4, 4 + more * rank, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(2 * STEPS):
        x = torch.randn(sizes[i % len(sizes)], WIDTH)
        last = i % every == every - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = ddp(x).square().mean()
            loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]


def heads_in_turn(ddp, model, rank):
    found = []
    for i in range(3 * STEPS):
        model.zero_grad()
        loss = ddp(torch.randn(4, 8), i % 3 == 0).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


CASES = {
    "in buckets": (Net, {"bucket_cap_mb": 1}, steps),
    "accumulated": (Net, {"gradient_as_bucket_view": True}, partial(steps, every=3)),
    "of many sizes": (Net, {}, partial(steps, more=2)),
    "unused parameters": (TwoHeads, {"find_unused_parameters": True}, heads_in_turn),
}


def run(name, rank, word, **options):
    build, more, loop = CASES[name]
    torch.manual_seed(3)
    model = amp_graph.convert(build(), f"bf16,replay={word}")
    ddp = DistributedDataParallel(model, **more, **options)
    torch.manual_seed(rank)
    found = loop(ddp, model, rank)
    notes = [n for n in amp_graph.report(model).notes if "replay" in n]
    captured = conversion_of(model).captured
    return found, notes, len(captured.replays.guard_sets) if captured.replays else 0


def as_rank(rank, path, names):
    """Run each case with and without replay; keep what differs, and what the report says."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    recorder.RECORDERS["cpu"] = StandIn
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/group", rank=rank, world_size=2)
    kept = {}
    for name in names:
        StandIn.made.clear()
        found, notes, graphs = run(name, rank, "true")
        replayed = sum(one.replayed for one in StandIn.made)
        expected, _, _ = run(name, rank, "false")
        differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
        shared = [t for t in found[-9:-3] if t.numel() > 4]
        kept[name] = (differ, notes, replayed, graphs, shared)
    torch.save(kept, f"{path}/{rank}")
    gc.collect()  # DDP's reducers, which must not be the last owners of the group
    torch.distributed.destroy_process_group()


def in_two_processes(path, *args):
    mp.spawn(as_rank, (str(path), *args), nprocs=2)
    return [torch.load(f"{path}/{rank}") for rank in range(2)]


@pytest.mark.slow
def test_replayed_ranks_have_the_bits_of_ranks_that_are_not(tmp_path):
    found = in_two_processes(tmp_path, tuple(CASES))
    for kept in found:
        for name, (differ, notes, replayed, _, _) in kept.items():
            assert differ == [], name
            assert replayed > 10, (name, notes)
            assert not any("is not recorded" in note for note in notes), (name, notes)
    assert found[0]["in buckets"][3] >= 2  # one graph a bucket
    weights = [kept["accumulated"][4] for kept in found]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))  # reduced, on both


# -- what is not recorded, in one process ---------------------------------------------------------------


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setitem(recorder.RECORDERS, "cpu", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def notes_of(model, call):
    model = amp_graph.convert(model, "bf16,replay=true")
    call = call(model)
    for _ in range(5):
        outs = call(torch.randn(4, 8))
        sum(out.sum() for out in (outs if isinstance(outs, tuple) else (outs,))).backward()
    return "\n".join(amp_graph.report(model).notes)


@layers(lambda: dict(linear=nn.Linear(8, 8)))
def Small(self, x):
    return self.linear(x).relu() * 2


def test_a_call_outside_of_ddp_and_static_graphs_are_not_recorded(group):
    assert eligibility.OUTSIDE in notes_of(Small(), lambda model: model)
    assert eligibility.STATIC in notes_of(Small(), lambda model: DistributedDataParallel(model, static_graph=True))
    assert not StandIn.made


def test_sharded_models_and_synchronized_batch_norms_are_not_recorded(group):
    sharded = nn.Sequential(Small())
    sharded[0]._is_fsdp_managed_module = True
    assert re.match("FSDP shards 0", eligibility.why_not_with_ranks(sharded))
    assert re.search("SyncBatchNorm", eligibility.why_not_with_ranks(nn.Sequential(nn.SyncBatchNorm(4))))
    assert eligibility.why_not_with_ranks(Small()) == eligibility.OUTSIDE
