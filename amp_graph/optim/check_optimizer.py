"""Checks an optimizer and its state before anything changes.

Before: torch accepts ``optimizer.load_state_dict(checkpoint_of_another_model)``, and fused kernels, which do not check
sizes, read and write out of bounds. After: a ScaleError that says where.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer

from amp_graph.errors import CaptureError, ScaleError

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
        named = named_parameters(optimizer)
        name = next(name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks)
        raise CaptureError(
            f"TrainStep: {name} has a gradient hook, and the gradients of a step exist only inside of its "
            "graph\n  legal: clip_norm=, clip_value=; hooks on tensors that forward computes\n"
            "  fix:   amp_graph.convert(model) with amp_graph.GradScaler, where hooks of parameters run"
        )


def refuse_state_of_another_model(caller: str, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Raise ScaleError if ``given``, a ``state_dict``, has state in shapes other than the parameters'."""
    keys = chain.from_iterable(group["params"] for group in given.get("param_groups", ()))  # torch reports if missing
    states = given.get("state", {})
    _refuse(caller, optimizer, (states.get(key, {}) for key in keys))


def refuse_own_state(caller: str, optimizer: Optimizer) -> None:
    """Raise ScaleError if ``optimizer`` already holds another model's state."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    _refuse(caller, optimizer, (optimizer.state.get(p, {}) for p in params))


def _refuse(caller: str, optimizer: Optimizer, states: Iterable[Mapping[str, Any]]) -> None:
    """Check torch's own optimizers, whose state has its parameter's shape; the state of others is not known."""
    kind = type(optimizer)
    if not is_torchs(optimizer) or issubclass(kind, OTHERWISE_SHAPED):
        return
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, (parameter, state) in enumerate(zip(params, states, strict=False)):
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in SCALARS and value.shape != parameter.shape:
                raise ScaleError(
                    f"{caller}: the state of {kind.__name__} has {name!r} of shape {tuple(value.shape)} for parameter "
                    f"{number}, whose shape is {tuple(parameter.shape)}\n"
                    "  legal: the state of an optimizer over the same model, its parameters in the same order\n"
                    "  fix:   optimizer.load_state_dict(...) with the checkpoint of this model, or a new optimizer"
                )
