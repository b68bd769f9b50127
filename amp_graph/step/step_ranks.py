"""The ranks of a ``TrainStep``: which average gradients, and what they tell each other in their process group's store.

Before: a rank that calls other collectives than the others, or none: they wait for a bare timeout, and gloo may end a
process. After: an error on each rank, before the collectives or within the time limit, that names rank and cause.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from amp_graph.errors import CaptureError, RankError
from amp_graph.lists.errors import Attempt, first_line
from amp_graph.passes.calibration.node_keys import few
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.node_info import is_collective

FAILED = "failed"  # the key under which a rank tells why it failed
GRACE = 2.0  # seconds until a rank that has not come is called absent, once a collective has failed
LONGEST = 0.25  # seconds between two looks
RESTART = "then start all ranks again, from a checkpoint"


def ranks_of(process_group: Any, model: torch.nn.Module, dtype: torch.dtype | None) -> Ranks | None:
    """Return the ranks to average over: ``process_group``, all ranks for None, none for False or one process.

    Of a sharded model, None stands for its mesh, even for one of one rank. Parameters and buffers, but for sharded
    ones, become those of the first rank, as DDP does it.
    """
    known = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
    if process_group is not None and process_group is not False and not known:
        raise CaptureError(
            f"TrainStep: process_group={process_group!r}\n  legal: a torch.distributed.ProcessGroup; None for all "
            "ranks; False for none\n  fix:   process_group=None"
        )
    every = default_group()
    if process_group is False or every is None:
        return None
    sharded: Any = next((p for p in model.parameters() if hasattr(p, "to_local")), None)
    mesh = None if sharded is None else sharded.device_mesh
    group: Any = process_group or (mesh.get_group() if mesh is not None and mesh.ndim == 1 else every)
    size = dist.get_world_size(group)
    if size == 1 and mesh is None:
        return None
    made = Ranks(group, model, dtype, is_sharded=mesh is not None)
    _make_equal(model, group)
    return made


def default_group() -> Any:
    """Return the group of all ranks, or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _make_equal(model: torch.nn.Module, group: Any) -> None:
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [p for p in (*model.parameters(), *model.buffers()) if not hasattr(p, "to_local")]:
            dist.broadcast(tensor.detach(), first, group=group)


# -- what ranks tell each other ------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the ranks have in common that run a graph together.

    part: which of a step's graphs it is. digest: of its collectives, and of the modes of a sharded model, as a graph of
    another mode is another one. modes: "1" or "0" for each flag of the model.
    """

    part: tuple[Any, ...]
    digest: str
    modes: str


class Ranks:
    """The ranks that average gradients, and their notes: places, plans, and why one failed. A note is no collective.

    group, size: a process group's name and size. dtype: of the all-reduce.

    A rank notes its place, the step and the number of the graph in it, before it calls the collectives of a graph. If
    its plan is not the one of before, it first waits for the plans of all ranks. One that has passed that place without
    noting a plan has kept the one of before.
    """

    def __init__(self, group: Any, model: torch.nn.Module, dtype: torch.dtype | None, *, is_sharded: bool) -> None:
        """Begin in front of the first step."""
        self.group, self.size, self.dtype = group.group_name, dist.get_world_size(group), dtype
        self._model, self._is_sharded = model, is_sharded
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        store = group.get_group_store()
        if dist.get_backend(group) == "fake":  # of a dry run: there are no other ranks, and its store keeps nothing
            self._ranks, store = [self._rank], dist.HashStore()  # type: ignore[attr-defined]
        number = store.add(f"amp_graph: steps of rank {self._rank}", 1)  # all ranks make them in the same order
        self._store: Any = dist.PrefixStore(f"amp_graph: step {number}", store)  # type: ignore[attr-defined]
        self._step, self._graph = 1, 0
        self._failures = 0  # since the last step that did not fail: what others noted before as many is of no worth
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._noted = ""  # the key of the last plan that this rank has noted

    def plan_of(self, gm: GraphModule, *part: Any) -> Plan | None:
        """Return the plan of a graph, which is traced for the present modes of the model; None without collectives."""
        sent = [(n.target, value(n.all_input_nodes[0])) for n in gm.graph.nodes if is_collective(n)]
        if not sent:
            return None
        text = "; ".join(f"{target} {tensor.dtype} {tuple(tensor.shape)}" for target, tensor in sent)
        modes = "".join("01"[flag] for flag in self._flags().values())
        digest = hashlib.sha256((text + modes * self._is_sharded).encode()).hexdigest()
        return Plan(part if self._is_sharded else (), digest, modes)

    def _flags(self) -> dict[str, bool]:
        """Return the flags of the model, by the code that reads them."""
        trained = {f"model.{name}.requires_grad": p.requires_grad for name, p in self._model.named_parameters()}
        modes = {
            f"model.{name}.".replace("..", ".") + "training": m.training for name, m in self._model.named_modules()
        }
        return trained | modes

    def come(self, plan: Plan) -> None:
        """Note that this rank is about to call collectives; RankError or CaptureError if others call other ones."""
        self._graph += 1
        before = self._plans.get(plan.part)
        if before is None or before.digest != plan.digest:
            self._agree(plan, before)
            self._plans[plan.part] = plan
        self._store.set(f"place of {self._rank}", f"{self._failures} {self._step} {self._graph}")

    def end_step(self) -> None:
        """Note that a step has not failed; take back what this rank told of an attempt before it."""
        self._step, self._graph = self._step + 1, 0
        if self._failures:
            self._failures = 0
            self._store.delete_key(FAILED)

    def tell(self, error: BaseException) -> None:
        """Tell other ranks why this one fails; raise RankError in the place of an error of a collective."""
        with Attempt(RankError) as tried:
            self._tell(error)
        if tried.error is not None and _is_of_collective(error):
            raise RankError(
                "TrainStep: the store of the process group has ended, and with it the rank or the launcher that holds "
                f"it, as rank 0 does by default\n  here: {first_line(error)}\n  fix:   mend that rank; {RESTART}"
            )

    def _tell(self, error: BaseException) -> None:
        told = self._told()
        is_waiting = _is_of_collective(error) or (bool(told) and type(error) is RuntimeError)
        reason = f"rank {self._rank} failed in its step: {type(error).__name__}: {first_line(error)}"
        if is_waiting and not told:
            told, reason = self._why_alone()
        self._failures, self._graph = self._failures + 1, 0
        if not told:
            self._store.set(FAILED, f"{self._failures} {reason}")
        if is_waiting:
            raise RankError(f"TrainStep: {told or reason}\n  here: {first_line(error)}\n  fix:   {_fix(told)}{RESTART}")

    def _told(self) -> str:
        """Return why another rank has failed in this attempt of a step; "" if none has told."""
        if not self._store.check([FAILED]):
            return ""
        count, _, reason = self._store.get(FAILED).decode().partition(" ")
        return reason if int(count) > self._failures else ""

    def _why_alone(self) -> tuple[str, str]:
        """Return what another rank tells within some seconds; and which ranks have not come, or that all have."""
        here, end, pauses = (self._step, self._graph), time.monotonic() + GRACE, _pauses()
        while True:
            others = [rank for rank in self._ranks if rank != self._rank]
            absent = [rank for rank in others if self._place_of(rank)[1:] < here]
            told = self._told()
            if told or not absent or time.monotonic() > end:
                break
            time.sleep(next(pauses))
        if not absent:
            return told, f"a collective of step {self._step} failed, to which all ranks had come"
        return told, self._missed(absent)

    def _missed(self, absent: list[int]) -> str:
        """Return that these ranks have not come."""
        last = max(self._place_of(rank)[1] for rank in absent)
        waited = _named(rank for rank in self._ranks if rank not in absent)
        return (
            f"{_named(absent)}, last in step {last}, did not come to step {self._step}, in which {waited} waited: left "
            "the training loop, ended, or took longer than the time limit of the process group"
        )

    def _place_of(self, rank: int) -> tuple[int, int, int]:
        """Return the failures, the step and the graph that a rank has noted; the step is 0 before its first."""
        key = f"place of {rank}"
        if not self._store.check([key]):
            return 0, 0, 0
        failures, step, graph = map(int, self._store.get(key).split())
        return failures, step, graph

    # -- plans ----------------------------------------------------------------------------------------

    def _agree(self, plan: Plan, before: Plan | None) -> None:
        """Wait until all ranks have noted a plan for this place, or have passed it; raise if one has another plan."""
        here = f"in {self._step} {self._graph}"
        key = f"plan of {self._rank} {here}"
        self._store.set(key, f"{self._failures} {plan.digest} {plan.modes}")
        found: dict[int, list[str]] = {}
        end, pauses = time.monotonic() + self._store.timeout.total_seconds(), _pauses()
        missing = self._ranks
        while True:
            found |= {rank: noted for rank in missing if (noted := self._plan_of(rank, here, before)) is not None}
            missing = [rank for rank in missing if rank not in found]
            if not missing:
                break
            if told := self._told():
                raise RankError(f"TrainStep: {told}\n  fix:   mend that rank; {RESTART}")
            if time.monotonic() > end:
                raise RankError(f"TrainStep: {self._missed(missing)}\n  fix:   {_fix('')}{RESTART}")
            time.sleep(next(pauses))
        unlike = [rank for rank, (digest, _) in found.items() if digest != plan.digest]
        if unlike:
            self._refuse(plan.modes, found[unlike[0]][1], unlike)
        if self._noted not in ("", key):  # all ranks have read it, as they have noted later ones
            self._store.delete_key(self._noted)
        self._noted = key

    def _plan_of(self, rank: int, here: str, before: Plan | None) -> list[str] | None:
        """Return digest and modes of a rank's plan; None if it has noted none and not passed this place without."""
        key = f"plan of {rank} {here}"
        failures, *place = self._place_of(rank)  # first: it may note its plan and pass meanwhile
        if self._store.check([key]):
            noted, *known = self._store.get(key).decode().split()
            return known if int(noted) >= self._failures else None
        has_passed = failures >= self._failures and place >= [self._step, self._graph]
        return ([before.digest, before.modes] if before else ["", ""]) if has_passed else None

    def _refuse(self, modes: str, others: str, unlike: list[int]) -> NoReturn:
        """Raise RankError that names the flags in which ranks differ; CaptureError where they have the same ones."""
        flags = zip(self._flags(), modes, others, strict=False)
        own = [f"{name}={one == '1'}" for name, one, other in flags if one != other]
        if own:
            raise RankError(
                f"TrainStep: rank {self._rank} has {few(own)}, unlike {_named(unlike)}, and so other collectives\n"
                "  legal: the same modes, and the same trained parameters, on all ranks in each step\n"
                "  fix:   call train(), eval() and requires_grad_() on all ranks, before the same step"
            )
        raise CaptureError(
            f"TrainStep: the steps of {_named(unlike)} have other collectives than this rank's\n"
            "  legal: batches for which all ranks read the same parameters, and plan their weights in the same dtypes\n"
            "  fix:   layers that all ranks run, batches of one shape, or 'skip_unprofitable=false' in the policy"
        )


def _is_of_collective(error: BaseException) -> bool:
    """Say whether an error is of a process group, or of its store; gloo's are told by the file that they name."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait between looks, from a millisecond on."""
    yield from (min(0.001 * 2**n, LONGEST) for n in itertools.count())


def _named(ranks: Iterable[int]) -> str:
    found = list(map(str, ranks))
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)}"


def _fix(told: str) -> str:
    return "mend that rank; " if told else "as many steps on all ranks, or a longer time limit; "
