"""The dtype in which ``fully_shard`` (FSDP2) gathers each parameter of a unit; torch 2.11 to 2.13.

Before: one dtype for a unit, that of its ``MixedPrecisionPolicy``. After: ``gather_in(record, torch.bfloat16)``; the
unit's gather stays one collective, over bytes where dtypes are mixed. Goes when torch takes a dtype for each parameter
(pytorch#156784). torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from amp_graph.passes.torch_compat.modules import is_sharded


def records_of(module: Module) -> dict[str, Any]:
    """Return FSDP's record of each parameter in the unit of ``module``, by its name in ``module``.

    Empty where ``module`` is no unit, or has units inside.
    """
    if not is_sharded(module) or any(is_sharded(part) for part in module.modules() if part is not module):
        return {}
    paths = {id(part): f"{path}." if path else "" for path, part in module.named_modules()}
    records = [record for group in _groups(module) for record in group.fsdp_params]
    infos = [(record, record._module_info) for record in records]
    return {paths[id(info.module)] + info.param_name: record for record, info in infos if id(info.module) in paths}


def _groups(module: Module) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    return [group for group in (groups or [state._fsdp_param_group]) if group is not None]


def dtype_by_user(records: dict[str, Any]) -> torch.dtype | None:
    """Return the ``param_dtype`` of the unit's ``MixedPrecisionPolicy``; None if it has none."""
    return next((record.mp_policy.param_dtype for record in records.values() if record.mp_policy.param_dtype), None)


def is_at_rest(module: Module) -> bool:
    """Say whether nothing of the unit of ``module`` is gathered or on its way, and no gradient waits to be reduced."""
    groups = _groups(module)
    if any(not group.is_sharded or group._all_gather_result is not None for group in groups):
        return False
    known = [r._unsharded_param for group in groups for r in group.fsdp_params if hasattr(r, "_unsharded_param")]
    return all(one.grad is None for one in known)


def gather_in(record: Any, dtype: torch.dtype | None) -> None:
    """Gather a parameter in ``dtype`` from its next gather on, None: its own; only while ``is_at_rest``."""
    record.param_dtype = dtype
    record.all_gather_outputs = []  # the memory of the other dtype
    record.__dict__.pop("_unsharded_param", None)


def sum_in_fp32(record: Any) -> None:
    """Let autograd sum the gradient of a gathered low-precision parameter in fp32, as FSDP reduces one dtype a unit."""
    record._unsharded_param.grad_dtype = torch.float32


def agreed(records: dict[str, Any], wanted: set[str]) -> set[str]:
    """Return the names that are ``wanted`` on all ranks which gather these parameters together: a collective."""
    first = next(iter(records.values()))
    flags = torch.tensor([name in wanted for name in records], dtype=torch.int32, device=first.device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, first.mesh_info.shard_process_group)
    return {name for name, flag in zip(records, flags.tolist(), strict=True) if flag}


def gathered_bytes(records: dict[str, Any], dtypes: dict[str, torch.dtype]) -> int:
    """Return the bytes that one gather of a unit brings to a rank, where ``dtypes`` has those of its parameters."""
    return sum(record._orig_size.numel() * dtypes[name].itemsize for name, record in records.items())


# -- a whole model, captured as if it was not sharded -----------------------------------------------------


class ShardedUnit(NamedTuple):
    """One group of a unit: path of its module, sharded parameters, and what ``fully_shard`` was told of it."""

    path: str
    parameters: tuple[torch.Tensor, ...]
    reshards: bool
    policy: Any
    offloads: bool
    divides: float | None


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
        for group in _groups(module):
            if id(group) not in known:
                known.add(id(group))
                own = tuple(record.sharded_param for record in group.fsdp_params)
                reshards, factor = group.post_forward_mesh_info is not None, group.gradient_divide_factor
                offloads = any(record.offload_to_cpu for record in group.fsdp_params)
                found.append(ShardedUnit(path, own, reshards and not keeps, group.mp_policy, offloads, factor))
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
