"""The parameters that ``fully_shard`` left in a model, and what stands for them while a step is captured.

Before: DTensors, and hooks of FSDP that gather them. After: inside of ``unsharded()`` the model has parameters of full
size without memory, and no hooks: Dynamo captures it, and finds its captures, as if nothing was sharded. Graphs get
this rank's shards in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.dynamo_backend import Compile
from amp_graph.errors import CaptureError
from amp_graph.passes.sharding.shard_parameters import Unit
from amp_graph.passes.torch_compat.fully_sharded import (
    ShardedUnit,
    reshard,
    told_of_reductions,
    units_of,
    without_hooks_of_fsdp,
)
from amp_graph.passes.torch_compat.modules import is_fsdp, is_sharded
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW

OTHERWISE = "  fix:   amp_graph.convert(model) with amp_graph.GradScaler"


class ShardedModel:
    """The sharded parameters of ``model``; it has no ``units`` if it has none. reduce_dtype: as of ``TrainStep``."""

    def __init__(self, model: torch.nn.Module, reduce_dtype: torch.dtype | None = None) -> None:
        """Read the units."""
        self.model, self._reduce_dtype = model, reduce_dtype
        self._stand_ins: dict[int, Tensor] = {}  # by id of the sharded parameter
        self._sharded: dict[int, Any] = {}  # by id of its stand-in
        self._unit: dict[int, int] = {}  # the numbers of units, by id of the stand-in
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._every: list[ShardedUnit] = []  # units, those without parameters, too
        self.units: list[Unit] = []
        if any(is_sharded(module) for module in model.modules()):
            self._read()

    def _read(self) -> None:
        """Read the units, and where modules hold their parameters; known ones keep their stand-ins."""
        self._every = units_of(self.model)
        filled = [one for one in self._every if one.parameters]
        self.units = [_unit(one, self._reduce_dtype) for one in filled]
        owners = {id(p): n for n, one in enumerate(filled) for p in one.parameters}
        held = [(m._parameters, name, p) for m in self.model.modules() for name, p in m._parameters.items()]
        self._places = [place for place in held if id(place[2]) in owners]
        known = self._stand_ins
        every = {id(p): p for _, _, p in self._places}
        self._stand_ins = {key: known[key] if key in known else _stand_in(p) for key, p in every.items()}
        self._sharded = {id(self._stand_ins[key]): p for key, p in every.items()}
        self._unit = {id(stand_in): owners[key] for key, stand_in in self._stand_ins.items()}

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Let the model have full-size parameters without memory, and no hooks of FSDP."""
        if not self.units:
            yield
            return
        _refuse_reductions(self._every)
        self._follow()
        with without_hooks_of_fsdp(self.model):
            try:
                for holder, name, p in self._places:
                    stand_in = self._stand_ins[id(p)]
                    stand_in.requires_grad_(p.requires_grad)
                    holder[name] = stand_in
                yield
            finally:
                self._put_back()

    @contextmanager
    def resharded(self) -> Iterator[None]:
        """Let the model have its sharded parameters again, inside of ``unsharded()``: the user's code may read them."""
        self._put_back()
        try:
            yield
        finally:
            for holder, name, p in self._places:
                holder[name] = self._stand_ins[id(p)]

    def _put_back(self) -> None:
        for holder, name, p in self._places:
            holder[name] = p

    def _follow(self) -> None:
        """Free what a call of the model itself has gathered, and find parameters that were replaced."""
        if not all(holder.get(name) is p for holder, name, p in self._places):
            reshard(self.model)
            if not all(holder.get(name) is p for holder, name, p in self._places):
                self._read()

    # -- from what is captured to what is sharded, and back --------------------------------------------

    def stand_in(self, parameter: Tensor) -> Tensor:
        """Return what the model has for a parameter of the optimizer while it is captured."""
        return self._stand_ins.get(id(parameter), parameter)

    def parameter(self, stand_in: Tensor) -> Any:
        """Return the parameter that the optimizer and the user know."""
        return self._sharded.get(id(stand_in), stand_in)

    def unit_of(self, given: Any) -> int | None:
        """Return the number of the unit of an input of a captured graph; None if it is not sharded."""
        return self._unit.get(id(given))

    def local(self, given: Any) -> Any:
        """Return this rank's shard of a stand-in; of a sharded tensor; or what else is given."""
        whole = self._sharded.get(id(given), given)
        if not hasattr(whole, "to_local"):
            return whole
        with torch.no_grad():  # else it would have a history
            return whole.to_local()

    def given(self, args: Sequence[Any]) -> list[Any]:
        """Return the inputs of a captured graph with shards in the place of stand-ins."""
        return [self.local(a) for a in args] if self.units else list(args)

    def whole(self, shard: Tensor, parameter: Tensor) -> Any:
        """Return a gradient as the optimizer reads it: a DTensor for a parameter that is one."""
        owner = self.parameter(parameter)
        if not hasattr(owner, "to_local"):
            return shard
        kind: Any = type(owner.data)
        mesh, placements, stride = owner.device_mesh, owner.placements, owner.stride()
        return kind.from_local(shard, mesh, placements, run_check=False, shape=owner.shape, stride=stride)


def _stand_in(parameter: Tensor) -> torch.nn.Parameter:
    """Return a parameter without memory, as FSDP's own gathered parameters are between two gathers."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    whole.untyped_storage().resize_(0)
    return torch.nn.Parameter(whole, parameter.requires_grad)


def _mesh_of(one: ShardedUnit) -> Any:
    first: Any = one.parameters[0]
    return first.device_mesh


def _unit(one: ShardedUnit, reduce_dtype: torch.dtype | None) -> Unit:
    mesh = _mesh_of(one)
    inner = mesh.ndim - 1
    return Unit(
        name=one.path,
        group=mesh.get_group(inner).group_name,
        size=mesh.size(inner),
        ranks=mesh.size(),
        replicas=mesh.get_group(0).group_name if inner else "",
        reshards=one.reshards,
        reduce_dtype=reduce_dtype or one.group.mp_policy.reduce_dtype,
    )


# -- what is refused, before anything changes -----------------------------------------------------------


def refuse_other_sharding(model: torch.nn.Module, policy: Policy, compile: Compile, process_group: Any) -> None:
    """Raise CaptureError if a step cannot honour how ``model`` is sharded, or what it is asked for beside that."""
    every = dict(model.named_modules())
    names = {id(p): name for name, p in model.named_parameters()}
    old = next((name for name, module in every.items() if is_fsdp(module) and not is_sharded(module)), None)
    if old is not None:
        _refuse(f"{_named(old)} is wrapped by FullyShardedDataParallel", "fully_shard(module), torch's newer FSDP")
    units = units_of(model)
    sharded = {id(p): one for one in units for p in one.parameters}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stray = next((name for name, t in tensors if hasattr(t, "to_local") and id(t) not in sharded), None)
    if stray is not None:
        what = f"{stray} is a DTensor that no unit of fully_shard has, as tensor parallelism makes"
        _refuse(what, "parameters sharded by fully_shard alone")
    for one in units:
        for p in one.parameters:
            _refuse_placement(names.get(id(p), one.path), p)
        if why := _told_otherwise(one):
            _refuse(f"{_named(one.path)}: {why[0]}", why[1])
    _refuse_reductions(units)
    if not units:
        return
    meshes = {_mesh_of(one): _named(one.path) for one in units if one.parameters}
    if len(meshes) > 1:
        _refuse(f"{' and '.join(meshes.values())} are sharded over different meshes", "one mesh for all units")
    converted = next((name for name, module in every.items() if conversion_of(module) is not None), None)
    if converted is not None:
        raise CaptureError(
            f"TrainStep: {_named(converted)} is converted, and the model is sharded by fully_shard: a step plans the "
            "whole of it\n  fix:   TrainStep(model, ..., policy) over a sharded model that is not converted"
        )
    _refuse_options(model, policy, compile, process_group, units)


def _refuse_options(
    model: torch.nn.Module, policy: Policy, compile: Compile, process_group: Any, units: Sequence[ShardedUnit]
) -> None:
    """Raise CaptureError for options of a step that a sharded model has no room for."""
    if policy.level in HELD_LOW or policy.widen:
        raise CaptureError(
            f"TrainStep: policy='{policy}' changes the parameters of the model, which fully_shard has sharded\n"
            "  legal: O0, O1\n  fix:   O1, where the sharded fp32 parameters are the masters of low-precision copies"
        )
    if compile != "eager":
        raise CaptureError(
            f"TrainStep: compile={compile!r}, and {type(model).__name__} is sharded by fully_shard\n"
            "  legal: compile='eager'\n  fix:   leave compile out"
        )
    mesh = next(_mesh_of(one) for one in units if one.parameters)
    whole: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    if mesh.ndim > 1 and mesh.size() != dist.get_world_size():
        _refuse("the model is sharded over a part of the ranks in two dimensions", "a mesh of all ranks")
    if process_group is not None and (process_group is False or process_group.group_name != whole.group_name):
        raise CaptureError(
            f"TrainStep: process_group={process_group!r}, and {type(model).__name__} is sharded over a mesh, whose "
            "ranks average gradients\n  fix:   process_group=None"
        )


def _refuse(what: str, legal: str) -> None:
    raise CaptureError(f"TrainStep: {what}\n  legal: {legal}\n{OTHERWISE}")


def _named(path: str) -> str:
    return path or "the model"


def _refuse_placement(name: str, parameter: Any) -> None:
    """Raise CaptureError for a parameter that is not cut into rows."""
    *outer, last = parameter.placements
    rows = last.is_shard(0) and type(last).__name__ == "Shard"  # its strided kind has other rows
    if len(outer) > 1 or any(not one.is_replicate() for one in outer) or not rows:
        placed = ", ".join(map(str, parameter.placements))
        _refuse(f"{name} has the placements ({placed})", "Shard(0), or Replicate() and Shard(0) on a mesh of two")


def _told_otherwise(one: ShardedUnit) -> tuple[str, str] | None:
    """Return what a unit was told that a step does not do, and what it does."""
    policy = one.group.mp_policy
    if policy.param_dtype is not None or policy.output_dtype is not None:
        return (
            "its MixedPrecisionPolicy has a dtype of parameters or outputs, and a TrainStep chooses those of weights",
            "fully_shard without mp_policy, or with its reduce_dtype alone; keep_fp32= of the step's policy",
        )
    if one.offloads:
        return "its parameters are offloaded to the CPU", "fully_shard without offload_policy"
    return None


def _refuse_reductions(units: Sequence[ShardedUnit]) -> None:
    """Raise CaptureError if a unit was told to reduce gradients otherwise; between two steps it may have been."""
    for one in units:
        if call := told_of_reductions(one.group):
            what = f"{_named(one.path)}: {call} was called, and each step averages gradients over all ranks"
            _refuse(what, "averages alone; micro_batches= adds up gradients of several batches")
