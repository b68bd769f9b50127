"""Hooks and state of torch's optimizers, and which there are: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # 2.11 - 2.13; two are public, but in no list of its module
    _global_optimizer_pre_hooks,  # 2.11 - 2.13; two are public, but in no list of its module
    register_optimizer_step_post_hook,  # 2.11 - 2.13; two are public, but in no list of its module
    register_optimizer_step_pre_hook,  # 2.11 - 2.13; two are public, but in no list of its module
)

Kind = TypeVar("Kind")
_ON_STEP: set[Callable[..., Any]] = set()  # what is called by all optimizers


def on_every_optimizer_step(before: Callable[..., Any], after: Callable[..., None] | None = None) -> Callable[[], None]:
    """Call ``before(optimizer, args, kwargs)`` and ``after(...)`` around ``step()`` of all torch optimizers.

    Once however often it is asked for; the result ends that.
    """
    if before in _ON_STEP:
        return lambda: None
    _ON_STEP.add(before)
    hooks = [register_optimizer_step_pre_hook(before)]
    if after is not None:
        hooks.append(register_optimizer_step_post_hook(after))

    def end() -> None:
        _ON_STEP.discard(before)
        for hook in hooks:
            hook.remove()

    return end


def load_hooks_of(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dicts of hooks before and after ``load_state_dict`` of ``optimizer``; 2.11 - 2.13."""
    return optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks


def living(kind: type[Kind]) -> list[Kind]:
    """Return the optimizers, or scalers, of ``kind`` in this process; ``isinstance`` would ask proxies."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def steps_otherwise(optimizer: torch.optim.Optimizer) -> str:
    """Say what ``optimizer.step()`` does beyond its class's method, or "": hooks, or a replaced ``step``.

    A scheduler installs a ``step`` of its own, which only counts. torch/optim/optimizer.py, lr_scheduler.py; 2.11 to
    2.13.
    """
    own: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    hooks = [
        hook for held in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks) for hook in held.values()
    ]
    if any(not str(getattr(hook, "__module__", "")).startswith("amp_graph.") for hook in hooks):
        return "hooks of its step()"
    step: Any = optimizer.__dict__.get("step")
    behind = step.__wrapped__ if hasattr(step, "_wrapped_by_lr_sched") else getattr(step, "__func__", step)
    return "" if behind in (None, type(optimizer).step) else "a step() that was put in the place of its own"
