"""Units of ``fully_shard`` (FSDP2): the dtype in which each parameter is gathered, and a number of each rank with them.

Before: one dtype for a unit, that of its ``MixedPrecisionPolicy``. After: ``gather_in(record, torch.bfloat16)``; the
unit's gather stays one collective, over bytes where dtypes are mixed. Goes when torch takes a dtype for each parameter
(pytorch#156784). torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_param_group.py, 2.11 to 2.13.

A unit gathers one or more groups of parameters, each in one collective; a group has a record of each parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from amp_graph.passes.torch_compat.modules import CHECKPOINTED, is_sharded


def groups_of(module: Module) -> list[Any]:
    """Return the groups of parameters that the unit of ``module`` gathers; none if ``module`` is no unit."""
    if not is_sharded(module):
        return []
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    return [group for group in (groups or [state._fsdp_param_group]) if group is not None]


def every_group(model: Module) -> list[Any]:
    """Return the groups of all units in ``model``, each once."""
    return list(dict.fromkeys(group for part in model.modules() for group in groups_of(part)))


def root_of(unit: Module) -> Any:
    """Return the outermost module to which ``fully_shard`` was applied around ``unit``, once it was called."""
    return unit._get_fsdp_state()._state_ctx.all_states[0]._modules[0]  # type: ignore[operator]


def records_of(group: Any) -> dict[str, Any]:
    """Return FSDP's record of each parameter of a group, by its name in the outermost unit."""
    named = [(record._param_fqn, record) for record in group.fsdp_params]
    return {name.replace(f"{CHECKPOINTED}.", ""): record for name, record in named if name is not None}


def unit_name(group: Any) -> str:
    """Return the path, in the outermost unit, of the modules whose parameters are a group."""
    return group._module_fqn or ""


def dtype_of(record: Any) -> Any:
    """Return the dtype in which a parameter is gathered."""
    return record.param_dtype or record.orig_dtype


def reduced_dtype(group: Any) -> Any:
    """Return the dtype in which the gradients of a group are reduced: they have one."""
    first = next(record for record in group.fsdp_params if record.sharded_param.requires_grad)
    summed = getattr(gathered_parameter(first), "grad_dtype", None)
    return group._reduce_dtype or summed or dtype_of(first)


def gathered_parameter(record: Any) -> Any:
    """Return the parameter that a gather fills, one object for all gathers in one dtype; None before the first."""
    return getattr(record, "_unsharded_param", None)


def gathered_parameters(model: Module) -> list[Parameter]:
    """Return what gathers of the units in ``model`` have filled: autograd's leaves, which the model holds meanwhile."""
    records = [record for group in every_group(model) for record in group.fsdp_params]
    return [found for record in records if (found := gathered_parameter(record)) is not None]


def shard_group(group: Any) -> Any:
    """Return the process group over which a group is gathered."""
    return group.mesh_info.shard_process_group


def told_of_reductions(group: Any) -> str:
    """Return the call by which a group was told not to average gradients over all ranks, or not that alone; or ""."""
    told = {
        "set_requires_gradient_sync(False)": not group.reduce_grads,
        "set_requires_all_reduce(False)": not group.all_reduce_grads,
        "set_all_reduce_hook": group._all_reduce_hook is not None,
        "set_gradient_divide_factor": group.gradient_divide_factor is not None,
    }
    return next((call for call, was_called in told.items() if was_called), "")


def is_plain(group: Any) -> bool:
    """Say whether a group is sharded, and has no tensors that bring gathers of their own."""
    own = any(hasattr(record._sharded_local_tensor, "fsdp_pre_all_gather") for record in group.fsdp_params)
    return hasattr(group.mesh_info, "shard_process_group") and not own


def is_resharded(group: Any) -> bool:
    """Say whether a group is freed after its forward: nothing but that, and its backward, sees it gathered."""
    return group.post_forward_mesh_info is not None


def is_at_rest(group: Any, *, in_graphs: bool) -> bool:
    """Say whether nothing of a group is gathered or on its way, or read by a graph of autograd.

    ``in_graphs``: whether a forward since its last backward recorded gradients.
    """
    awaited = in_graphs and has_run(group)
    return group.is_sharded and group._all_gather_result is None and not awaited


def has_run(group: Any) -> bool:
    """Say whether a group had a forward since its last backward, with gradients or without."""
    return bool(group._post_forward_indices)


def gather_in(record: Any, dtype: torch.dtype | None) -> None:
    """Gather a parameter in ``dtype`` from its next gather on, None: its own; only while its group ``is_at_rest``.

    Its gradient is summed in its own dtype, in which FSDP reduces it, also what waits for its reduction by now.
    """
    before = record.__dict__.pop("_unsharded_param", None)
    _set_dtype(record, dtype)
    with torch.inference_mode(False):  # FSDP would make an inference tensor of it there, which no training could use
        # In fsdp_param.all_gather_outputs is the memory of the other dtype.
        size = record._sharded_param_data.numel()
        record.all_gather_outputs = []
        record.init_all_gather_outputs([size], [dtype or record.orig_dtype], _ranks(record), record.device)
        record.init_unsharded_param()
        parameter = record._unsharded_param
        parameter.grad_dtype = record.orig_dtype
        if before is not None and before.grad is not None:
            parameter.grad = before.grad
    record.free_unsharded_param()


def _set_dtype(record: Any, dtype: torch.dtype | None) -> None:
    """Set the dtype of a parameter's gathers, also behind ``unit.unshard()``, which sets those of the policy anew."""

    def init_dtype_attrs(policy: Any) -> None:
        type(record).init_dtype_attrs(record, policy)
        record.param_dtype = dtype

    record.init_dtype_attrs, record.param_dtype = init_dtype_attrs, dtype


def _ranks(record: Any) -> int:
    return int(record.mesh_info.shard_mesh_size)


def agreed(group: Any, wanted: list[bool]) -> list[bool]:
    """Return which of the wishes all ranks have that gather this group together: a collective."""
    flags = torch.tensor(wanted, dtype=torch.int32, device=group.device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, shard_group(group))
    return [bool(flag) for flag in flags.tolist()]


def gathered_bytes(record: Any, dtype: torch.dtype) -> int:
    """Return the bytes that one gather of a parameter in ``dtype`` brings to a rank, its own part among them."""
    return int(record._sharded_param_data.numel()) * _ranks(record) * dtype.itemsize


# -- a number of each rank, in the collective that gathers a group -------------------------------------


@torch.inference_mode(False)
def add_question(group: Any) -> Any:
    """Let each gather of a group bring a number of each rank, 0 at first; only while the group ``is_at_rest``.

    It is one more record of the group, of a parameter that no model has.
    """
    like = next(iter(records_of(group).values()))
    holder = Module()
    ranks = torch.zeros(_ranks(like), device=group.device)
    holder.register_parameter("question", Parameter(ranks, requires_grad=False))
    place = type(like._module_info)(holder, "question")
    policies = type(group.mp_policy)(), torch.distributed.fsdp.OffloadPolicy()
    meshes = like.mesh_info, like.post_forward_mesh_info
    record = type(like)(holder.question, place, *meshes, group.device, None, *policies)
    record.init_dtype_attrs(policies[0])
    gather_in(record, None)
    record.free_unsharded_param = lambda: None  # what was gathered stays readable
    record.alloc_all_gather_outputs()
    answer(record)
    group.fsdp_params.append(record)
    return record


def drop_question(group: Any, record: Any) -> None:
    """Leave ``add_question`` undone; only while the group ``is_at_rest``."""
    group.fsdp_params.remove(record)


def ask(record: Any, number: bool) -> None:
    """Set this rank's number, which the other ranks know after the next gather."""
    record._sharded_param_data.fill_(float(number))


def is_asked(record: Any) -> bool:
    """Say whether a rank's number was not 0 in the last gather: all ranks are told the same."""
    return bool(record.all_gather_outputs[0].any())


def answer(record: Any) -> None:
    """Forget what the last gather brought, and this rank's number; on all ranks."""
    ask(record, False)
    record.all_gather_outputs[0].zero_()


# -- a whole model, captured as if it was not sharded -----------------------------------------------------


class ShardedUnit(NamedTuple):
    """One group of a unit: path of its module, sharded parameters, and what ``fully_shard`` was told of it."""

    path: str
    group: Any
    parameters: tuple[torch.Tensor, ...]
    reshards: bool
    offloads: bool


def units_of(model: Module) -> list[ShardedUnit]:
    """Return the units of ``model``, a module that ``fully_shard`` was applied to as a list of one group included.

    The outermost unit keeps what it has gathered, unless it was told otherwise: FSDP decides so at the first forward.
    """
    found, known, inside = [], set[int](), set[int]()
    for path, module in model.named_modules():
        if not is_sharded(module):
            continue
        outermost = id(module) not in inside
        inside.update(id(part) for part in module.modules())
        keeps = outermost and getattr(module._get_fsdp_state(), "_auto_reshard_after_forward", False)
        for group in groups_of(module):
            if id(group) not in known:
                known.add(id(group))
                own = tuple(record.sharded_param for record in group.fsdp_params)
                offloads = any(record.offload_to_cpu for record in group.fsdp_params)
                found.append(ShardedUnit(path, group, own, is_resharded(group) and not keeps, offloads))
    return found


def reshard(model: Module) -> None:
    """Free what units of ``model`` have gathered: their modules have the sharded parameters again."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


@contextlib.contextmanager
def without_hooks_of_fsdp(model: Module) -> Iterator[None]:
    """Give the modules of ``model`` the classes that they had before ``fully_shard``, without its hooks and marks."""
    marks, hooks = ("_is_fsdp_managed_module", "_fsdp_use_orig_params"), ("_forward_pre_hooks", "_forward_hooks")
    before: list[tuple[Module, type, dict[str, Any]]] = []
    for module in model.modules():
        attributes = module.__dict__
        before.append((module, type(module), {key: attributes[key] for key in (*marks, *hooks) if key in attributes}))
    try:
        for module, kind, kept in before:
            module.__dict__.update((key, False) for key in marks if key in kept)
            if is_sharded(module):
                names = [base.__name__ for base in kind.__mro__]
                module.__class__ = kind.__mro__[names.index("FSDPModule") + 1]
                for key in hooks:
                    module.__dict__[key] = type(kept[key])(one for one in kept[key].items() if not _is_of_fsdp(one[1]))
        yield
    finally:
        for module, kind, kept in before:
            module.__class__ = kind
            module.__dict__.update(kept)


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
