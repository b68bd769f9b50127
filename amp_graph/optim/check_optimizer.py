"""Checks an optimizer and its state before anything changes, and unwraps those of other libraries.

Before: torch accepts ``optimizer.load_state_dict(checkpoint_of_another_model)``, and fused kernels, which do not check
sizes, read and write out of bounds. After: a ScaleError that says where. ``accelerator.prepare(optimizer)``, whose step
only calls the inner one, is the inner one; other wrappers are refused with a fix.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adafactor, Optimizer

from amp_graph.errors import CaptureError, ScaleError
from amp_graph.lists.errors import Attempt, Undo, shortened

SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # one number per parameter
OTHERWISE_SHAPED = (Adafactor, LBFGS)  # their state is factored, or a history


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is one of torch's; what others do is not known."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of ``optimizer``, each with a descriptive name."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            yield f"{name}, of shape {tuple(parameter.shape)}", parameter


def refuse_closures(caller: str, optimizer: Optimizer) -> None:
    """Raise ScaleError if ``optimizer.step()`` requires a closure."""
    if _needs_closure(type(optimizer).step):
        raise ScaleError(
            f"{caller}: {type(optimizer).__name__}.step needs a closure that computes gradients, but they "
            "are computed and checked before step is called\n  legal: an optimizer whose step() needs none\n"
            "  fix:   amp_graph.convert(model, 'bf16') without a loss scale, and optimizer.step(closure)"
        )


@cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_hooks(optimizer: Optimizer) -> None:
    """Raise CaptureError if a parameter has a gradient hook, which a graph would not call."""
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for g in optimizer.param_groups for p in g["params"]):
        hooked = (n for n, p in named_parameters(optimizer) if p._backward_hooks or p._post_accumulate_grad_hooks)
        raise CaptureError(
            f"TrainStep: {next(hooked)} has a gradient hook, and the gradients of a step exist only inside of its "
            "graph\n  legal: clip_norm=, clip_value=; hooks on tensors that forward computes\n"
            "  fix:   amp_graph.convert(model) with amp_graph.GradScaler, where hooks of parameters run"
        )


def refuse_state_of_another_model(caller: str, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Raise ScaleError if ``given`` has state in shapes other than the parameters'.

    given: a ``state_dict``, or the attributes of an optimizer. Torch's own optimizers are checked, whose state has its
    parameter's shape; the state of others is not known.
    """
    kind = type(optimizer)
    if not is_torchs(optimizer) or issubclass(kind, OTHERWISE_SHAPED):
        return
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    keys = chain.from_iterable(group["params"] for group in given.get("param_groups", ()))  # torch reports if missing
    states = given.get("state", {})
    for number, (parameter, key) in enumerate(zip(params, keys, strict=False)):
        for name, value in states.get(key, {}).items():
            if isinstance(value, Tensor) and name not in SCALARS and value.shape != parameter.shape:
                raise ScaleError(
                    f"{caller}: the state of {kind.__name__} has {name!r} of shape {tuple(value.shape)} for parameter "
                    f"{number}, whose shape is {tuple(parameter.shape)}\n"
                    "  legal: the state of an optimizer over the same model, its parameters in the same order\n"
                    "  fix:   optimizer.load_state_dict(...) with the checkpoint of this model, or a new optimizer"
                )


# The attributes of wrappers that hold the inner optimizer: accelerate, Lightning, Lookahead of timm and others.
INSIDE = ("optimizer", "_optimizer", "base_optimizer", "_base_optimizer", "optim", "_optim")


def unwrapped(optimizer: Any) -> Any:
    """Return the inner optimizer if the wrapper's step only calls the inner step, else ``optimizer``.

    Raises CaptureError for wrappers that are not torch optimizers, and for those that may skip steps.
    """
    name = next((name for name in INSIDE if isinstance(getattr(optimizer, "__dict__", {}).get(name), Optimizer)), "")
    own_hooks = isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in optimizer.__dict__
    if own_hooks:
        return optimizer  # its own step is called
    kind = type(optimizer)
    if name and (kind.__module__, kind.__qualname__) == ("accelerate.optimizer", "AcceleratedOptimizer"):
        _refuse_what_leaves_steps_out(optimizer)
        return optimizer.__dict__[name]
    if name:
        inner = type(optimizer.__dict__[name]).__name__
        public = "optimizer" if isinstance(getattr(kind, "optimizer", None), property) else name
        raise CaptureError(
            f"TrainStep: a {kind.__name__} wraps a {inner}, and its step() may do more than call the inner step()\n"
            "  legal: a torch.optim.Optimizer, made by Optimizer.__init__\n"
            f"  fix:   TrainStep(model, loss_fn, optimizer.{public}, ...), the inner optimizer"
        )
    if isinstance(optimizer, Optimizer):
        raise CaptureError(
            f"TrainStep: a {kind.__name__} that Optimizer.__init__ did not make: it has no hooks\n"
            f"  fix:   call super().__init__(params, defaults) in {kind.__name__}.__init__"
        )
    return optimizer


def _refuse_what_leaves_steps_out(optimizer: Any) -> None:
    """Raise CaptureError if accelerate scales or accumulates gradients; accelerate/optimizer.py, 1.15."""
    if getattr(optimizer, "scaler", None) is not None:
        raise CaptureError(
            "TrainStep: accelerate scales losses for this optimizer, and a TrainStep scales them, too\n"
            "  fix:   Accelerator(mixed_precision='no'), and TrainStep(model, loss_fn, optimizer, 'fp16')"
        )
    batches = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if batches != 1:
        raise CaptureError(
            f"TrainStep: accelerate calls this optimizer once in {batches} batches, and a TrainStep updates at each\n"
            f"  fix:   Accelerator(gradient_accumulation_steps=1), and TrainStep(..., micro_batches={batches})"
        )


def load_or_refuse(caller: str, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Let ``optimizer`` load ``given``. Raises ScaleError, without a change, if it is not the state of such a one.

    What an optimizer with a ``load_state_dict`` of its own, such as Lookahead, saves is known to itself only.
    """
    before = optimizer.state, optimizer.param_groups

    def undo() -> None:
        optimizer.state, optimizer.param_groups = before

    with Attempt(ScaleError) as tried, Undo(undo):
        optimizer.load_state_dict(dict(given))
        refuse_state_of_another_model(caller, optimizer, vars(optimizer))
        plain = type(optimizer).load_state_dict is Optimizer.load_state_dict
        if wrong := next(_unfit(optimizer, before[1]), "") if plain else "":
            raise ValueError(wrong)
    if tried.error is not None:
        raise ScaleError(
            f"{caller}: the optimizer's state does not fit: {tried.reason[:300]}\n"
            "  legal: what state_dict() of an optimizer over the same model returned\n"
            "  fix:   load the checkpoint of this model"
        ) from tried.error


def _unfit(optimizer: Optimizer, before: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what of the loaded state would fail at the next step, or make it a wrong one."""
    kind = type(optimizer)
    for number, (own, group) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        yield from (f"group {number} has no {n!r}" for n in own if n not in group and n != "param_names")
        if not group["params"] or not is_torchs(optimizer) or issubclass(kind, OTHERWISE_SHAPED):
            continue
        if isinstance(_one_step(kind, own, group["params"][0]), Exception):
            continue  # an optimizer that takes no step like that, such as a sparse one
        made = _one_step(kind, group, group["params"][0])
        if isinstance(made, Exception):
            yield f"the options of group {number} are refused: {str(made)[:200]}"
            return
        for at, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            for name, expected in made.items() if state else ():
                if name not in state or (isinstance(expected, Tensor) and not _is_like(state[name], name, kind, p)):
                    what = shortened(state[name], 60) if name in state else "missing"
                    yield f"{name!r} of parameter {at} of group {number} is {what}"


def _is_like(value: Any, name: str, kind: type[Optimizer], parameter: Tensor) -> bool:
    if value is None:
        return issubclass(kind, SGD)  # whose momentum begins with the first gradient
    if not isinstance(value, Tensor):
        return name == "step" and isinstance(value, (int, float)) and not isinstance(value, bool) and _is_count(value)
    plain = value.layout is torch.strided and not value.is_meta and not value.requires_grad
    whole = value.is_floating_point() or (name != "step" and value.is_complex() and parameter.is_complex())
    return plain and whole and (name != "step" or (value.numel() == 1 and _is_count(value.item())))


def _is_count(steps: float) -> bool:
    """Say whether ``steps`` may be a number of steps taken: Adam divides by 1 - beta**step at the next one."""
    return 0 <= steps < math.inf


def _one_step(kind: type[Optimizer], group: Mapping[str, Any], like: Tensor) -> Mapping[str, Any] | Exception:
    """Return the state of a parameter of one element after a step with the options of ``group``, or what it raises."""
    known = inspect.signature(kind).parameters
    options: dict[str, Any] = {
        k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items() if k in known
    }
    options.pop("params", None)
    dtype = like.dtype if like.is_complex() else torch.float32
    tiny = torch.zeros((1,) * max(like.dim(), 1), device=like.device, dtype=dtype, requires_grad=True)
    tiny.grad = torch.zeros_like(tiny)
    with Attempt() as tried:
        made = kind([tiny], **options)
        made.step()
    return tried.error or made.state[tiny]
