"""Checkpoints of steps by ``torch.distributed.checkpoint``: saved by some ranks, loaded by another number of them.

A step is saved sharded over two ranks, say, and goes on over four, or in one process that shards nothing.
"""

import contextlib
import functools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs

import amp_graph
from tests.step.processes import free_port, group_of
from tests.step.test_sharded_step import _distance, _equal, _Uneven, _whole

STEPS, INFINITE = 2, {1, 7}  # of each run; the steps of all runs at which one rank has an infinite loss


class Run(NamedTuple):
    """One run of a chain: how it shards, over how many ranks, and how it loads what the run before has saved."""

    kind: str  # "sharded", "hybrid", or "whole": not sharded
    ranks: int
    way: str = "apart"  # "flat", "full": of options of torch; "objects" that have state_dict() are given themselves
    trains_first: bool = False  # on other data, before it loads
    policy: str = ""


def _made(run, policy, kind_of_optimizer):
    """Return a model, its optimizer, and its step."""
    torch.manual_seed(0)
    model = _Uneven()
    if run.kind != "whole":
        from torch.distributed.fsdp import fully_shard

        shape = (run.ranks,) if run.kind == "sharded" else (2, run.ranks // 2)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for part in (*model.parts, model):
            fully_shard(part, mesh=mesh)
    optimizer = kind_of_optimizer(model.parameters())
    scale = {"loss_scale": amp_graph.LossScale(2.0**10, growth_interval=3)} if policy == "fp16" else {}
    return model, optimizer, amp_graph.TrainStep(model, _weighted, optimizer, policy, **scale)


def _weighted(out, labels, weight):
    return nn.functional.cross_entropy(out, labels) * weight


def _losses(step, run, numbers, rank, has_infinities):
    """Train on this rank's part of batches that are the same for any number of ranks; return the mean losses."""
    losses = []
    for i in numbers:
        generator = torch.Generator().manual_seed(i)
        ids, labels = (
            torch.randint(0, 11, (12, 5), generator=generator),
            torch.randint(0, 11, (60,), generator=generator),
        )
        is_infinite = has_infinities and i in INFINITE and rank == run.ranks - 1
        weight = torch.tensor(float("inf") if is_infinite else 1.0)
        loss = step(ids.chunk(run.ranks)[rank].clone(), labels.chunk(run.ranks)[rank].clone(), weight).clone()
        if run.ranks > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / run.ranks)
    return losses


def _state(model, optimizer, step):
    """Return what a checkpoint has, masters among it, by name; and the state of the loss scale."""
    names = {p: name for name, p in model.named_parameters()}
    found = {name: _whole(t.detach()).clone() for name, t in model.state_dict().items()}
    for p, state in optimizer.state.items():
        found |= {f"{names[p]}/{key}": _whole(value).clone() for key, value in state.items()}
    return found, step.state_dict()


# -- what users call -----------------------------------------------------------------------------------


def _given(model, optimizer, step, way):
    """Return what ``dcp`` saves, or loads into."""
    if way == "objects":
        return {"model": model, "optimizer": optimizer, "step": step}
    options = torchs.StateDictOptions(flatten_optimizer_state_dict=way == "flat", full_state_dict=way == "full")
    own = torchs.get_model_state_dict(model, options=options)
    return {"model": own, "optimizer": torchs.get_optimizer_state_dict(model, optimizer, options=options), "step": step}


def _save(parts, way, path):
    state = _given(*parts, way)
    if way != "full":
        dcp.save(state, checkpoint_id=path)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({**state, "step": state["step"].state_dict()}, path)


def _load(model, optimizer, step, way, path):
    if way == "full":  # one rank reads it for all
        state, options = torch.load(path), torchs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        step.load_state_dict(state["step"])
        if dist.get_rank() > 0:
            state = {"model": {}, "optimizer": {}}
    else:
        state = _given(model, optimizer, step, way)
        options = torchs.StateDictOptions(flatten_optimizer_state_dict=way == "flat")
        dcp.load(state, checkpoint_id=path)
    if way != "objects":
        torchs.set_model_state_dict(model, state["model"], options=options)
        torchs.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


# -- chains of runs ------------------------------------------------------------------------------------


def _run_chain(rank, ports, path, chain, policy, make_optimizer):
    """Let each run load what the one before has saved, train, save, and train on as the next one is to."""
    for i, run in enumerate(chain):
        if rank >= run.ranks:
            continue
        with group_of(rank, run.ranks, ports[i]) if run.ranks > 1 else contextlib.nullcontext():
            parts = _made(run, run.policy or policy, make_optimizer)
            train = functools.partial(_losses, parts[2], run, rank=rank, has_infinities=policy == "fp16")
            if run.trains_first:
                train(range(100, 102))
            if i:
                _load(*parts, run.way, f"{path}/{i}")
            loaded, losses, end = _state(*parts), train(range(STEPS * i, STEPS * (i + 1))), _state(*parts)
            if i + 1 < len(chain):
                _save(parts, chain[i + 1].way, f"{path}/{i + 1}")
            ahead, expected = train(range(STEPS * (i + 1), STEPS * (i + 2))), _state(*parts)
            kinds = {type(t).__name__ for s in parts[1].state.values() for name, t in s.items() if name != "step"}
            if rank == 0:
                torch.save((loaded, losses, end, ahead, expected, kinds), f"{path}/run{i}")
            del parts, train


ADAM = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
RADAM = functools.partial(torch.optim.RAdam, lr=1e-3)  # the update is behind the graph
TWO, FOUR, HYBRID, WHOLE = Run("sharded", 2), Run("sharded", 4), Run("hybrid", 4), Run("whole", 1)
MASTERS = Run("whole", 1, "flat", policy="bf16-O2")
CHAINS = {
    "as before": ([TWO, Run("sharded", 2, trains_first=True)], "fp16", ADAM),
    "other ranks": ([FOUR, Run("sharded", 2, trains_first=True), FOUR, WHOLE], "fp16", ADAM),
    "whole": (
        [WHOLE, Run("sharded", 4, "flat"), Run("hybrid", 4, "full"), Run("whole", 2, "flat", True)],
        "O0",
        SGD,
    ),
    "hybrid": ([HYBRID, Run("sharded", 2, "objects", True), Run("sharded", 4, "full")], "O0", RADAM),
    "masters": ([MASTERS, TWO, MASTERS], "bf16", ADAM),
}
MOST = {"O0": 2e-6, "bf16": 1e-2, "fp16": 5e-4}  # distance of two updates, of their size: sums of another order


@pytest.mark.parametrize("name", ["as before", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CHAINS][1:])])
def test_a_checkpoint_is_loaded_exactly_by_any_number_of_ranks_which_go_on_as_the_others_would(tmp_path, name):
    """In processes of their own, each one rank: DTensor's cache of shardings returns meshes of the rank it was."""
    chain, policy, _ = CHAINS[name]
    ports = [free_port() for _ in chain]
    mp.spawn(_run_chain, (ports, str(tmp_path), *CHAINS[name]), nprocs=max(run.ranks for run in chain))
    runs = [torch.load(tmp_path / f"run{i}") for i in range(len(chain))]
    for before, after, one, other in zip(chain, chain[1:], runs, runs[1:], strict=False):
        (_, _, saved, ahead, expected, _), (loaded, losses, end, _, _, kinds) = one, other
        assert _equal(loaded[0], saved[0])
        assert loaded[1] == saved[1]
        assert end[1] == expected[1], "loss scale and skipped steps"
        assert kinds == ({"Tensor"} if after.kind == "whole" else {"DTensor"})
        if (before.kind, before.ranks) == (after.kind, after.ranks):
            assert losses == ahead
            assert _equal(end[0], expected[0])
        assert losses == pytest.approx(ahead, rel=1e-6 if policy == "O0" else 1e-3)
        trained = [key for key in end[0] if "/" not in key]
        moved = _distance(end[0], loaded[0], trained)
        assert _distance(end[0], expected[0], trained) <= MOST[policy] * moved
