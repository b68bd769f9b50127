"""Hears the calls of torch's functions for mixed precision, without changing what they do.

Before: ``scaler.step(optimizer)``. After: the same, and ``Event("scaler.step", {"self": ..., "optimizer": ...}, ...)``
before and after it. The functions are replaced by wrappers while an audit runs; ``hear`` returns what puts them back.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.step.train_step import TrainStep

_SCALER = ("scale", "unscale_", "step", "update", "state_dict", "load_state_dict")
_CLIPPED = ("norm", "value")
HEARD: tuple[tuple[str, Any, str], ...] = (
    ("autocast.made", torch.autocast, "__init__"),
    ("autocast.enter", torch.autocast, "__enter__"),
    ("autocast.exit", torch.autocast, "__exit__"),
    *((f"scaler.{name}", scaler, name) for scaler in (torch.amp.GradScaler, GradScaler) for name in _SCALER),
    ("train_step", TrainStep, "__call__"),
    ("backward", torch.autograd, "backward"),
    *(("clip", place, f"clip_grad_{by}_") for place in (torch.nn.utils, torch.nn.utils.clip_grad) for by in _CLIPPED),
    ("scheduler.step", LRScheduler, "step"),
    ("scheduler.step", ReduceLROnPlateau, "step"),
    ("optimizer.load_state_dict", Optimizer, "load_state_dict"),
    ("save", torch, "save"),
    ("load", torch, "load"),
    ("ddp", DistributedDataParallel, "__init__"),
    ("ddp.hook", DistributedDataParallel, "register_comm_hook"),
    ("compile", torch, "compile"),
    ("compile", torch.nn.Module, "compile"),
    ("eval", torch.nn.Module, "eval"),
)
"""(name of the event, what holds the function, the function's name)."""
UNCOUNTED = f"{__file__}: importlib._bootstrap"
"""The file of the wrappers. Where a warning is to stand at its caller's line, Python does not count frames of its own
importer, which it knows by both of these words: torch's warnings stand at the user's line, as without an audit."""

Tell = Callable[[str, Mapping[str, Any], FrameType, bool, Any], None]


def hear(tell: Tell) -> Callable[[], None]:
    """Tell of all calls of ``HEARD`` as (event, arguments, caller, is_after, result); the result ends that."""
    functions = [(*heard, heard[1].__dict__[heard[2]]) for heard in HEARD if heard[2] in heard[1].__dict__]
    for event, place, name, plain in functions:
        setattr(place, name, _told(event, plain, tell))

    def end() -> None:
        for _, place, name, plain in functions:
            setattr(place, name, plain)

    return end


def _told(event: str, plain: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def told(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return plain(*args, **kwargs)
        try:
            arguments: Mapping[str, Any] = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call raises the same
            return plain(*args, **kwargs)
        caller = sys._getframe(1)
        tell(event, arguments, caller, False, None)
        result = plain(*args, **kwargs)
        tell(event, arguments, caller, True, result)
        return result

    call: Any = told
    call.__code__ = call.__code__.replace(co_filename=UNCOUNTED)
    return functools.wraps(plain)(call)
