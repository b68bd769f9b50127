"""Modules: what they store, swapped and sharded parameters, and which ones other parts of torch made.

Each name states the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module  # 2.11 - 2.13

CHECKPOINTED = "_checkpoint_wrapped_module"  # the name of what ``checkpoint_wrapper`` was given, in it; 2.11 to 2.13


def plain_attribute(module: Module, name: str) -> Any:
    """Return the value that ``module``, or its class, stores under ``name``; None if code computes it."""
    if name in module.__dict__:
        return module.__dict__[name]
    kind = next((kind for kind in type(module).__mro__ if name in kind.__dict__), None)
    if kind is None or hasattr(type(kind.__dict__[name]), "__get__"):
        return None
    return kind.__dict__[name]


def uninitialized(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of parameters and buffers without a shape yet: those of lazy modules before their first call."""
    return [name for name, tensor in named if is_lazy(tensor)]


def with_parameters(module: torch.nn.Module, instead: dict[str, torch.Tensor]) -> Any:
    """Return a context in which ``module`` has these tensors as parameters, ties included; Dynamo traces it.

    torch.nn.utils.stateless; 2.11 to 2.13. ``torch.func.functional_call`` would run the module's hooks, too.
    ``stack_weights`` restores parameters in reverse order: a module registered under two names has each of its
    parameters swapped twice, and would otherwise keep those of the first swap.
    """
    return _reparametrize_module(module, instead, tie_weights=True, stack_weights=True)


def is_sharded(module: torch.nn.Module) -> bool:
    """Say whether ``fully_shard`` was applied to this very module; 2.11 to 2.13, without importing FSDP."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_fsdp(module: torch.nn.Module) -> bool:
    """Say whether FSDP, of either version, shards this very module; 2.11 to 2.13, without importing FSDP."""
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)


def behind_checkpoint(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``checkpoint_wrapper`` was given, or ``module`` itself; 2.11 to 2.13."""
    while type(module).__name__ == "CheckpointWrapper":
        module = getattr(module, CHECKPOINTED)
    return module


def surrounding_ddp() -> Any:
    """Return the DistributedDataParallel whose forward is running; 2.11 to 2.13."""
    if not torch.distributed.is_available():
        return None
    kind: Any = torch.nn.parallel.DistributedDataParallel
    return kind._get_active_ddp_module()


def is_compiled(module: torch.nn.Module) -> bool:
    """Say whether ``torch.compile`` made this very module, or ``module.compile()`` its call; 2.11 to 2.13."""
    made = any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
    return made or module.__dict__.get("_compiled_call_impl") is not None


def behind_compile(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` was given, or ``module`` itself; 2.11 to 2.13."""
    return getattr(module, "_orig_mod", module)


def is_exported(gm: GraphModule) -> bool:
    """Say whether torch.export made ``gm``, such as ``exported.module()``, or the graph that it is a copy of.

    2.11 to 2.13: torch.export sets this for every graph that it makes.
    """
    return "inline_constraints" in gm.meta


@contextlib.contextmanager
def registration_hooks_as_before() -> Iterator[None]:
    """Remove torch's own hooks of all modules' registrations that an inner call adds.

    Goes with torch 2.12, whose torch.export leaves one behind if it fails: from then on Dynamo breaks the graph of each
    forward that assigns to a buffer. torch/nn/modules/module.py, 2.11 - 2.13.
    """
    every = [getattr(modules, f"_global_{kind}_registration_hooks", {}) for kind in ("buffer", "module", "parameter")]
    before = [set(hooks) for hooks in every]
    try:
        yield
    finally:
        for hooks, known in zip(every, before, strict=True):
            new = {key: getattr(hook, "__module__", "") for key, hook in hooks.items() if key not in known}
            for added in (key for key, made_by in new.items() if made_by.startswith("torch.")):
                del hooks[added]
