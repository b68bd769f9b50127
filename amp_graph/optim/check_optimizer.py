"""What an optimizer must be, and what its state must fit, checked before anything changes.

Before: ``optimizer.load_state_dict(checkpoint_of_another_model)``, which torch takes, and whose sizes fused kernels do
not look at: they read and write behind the end of the moments. After: a ScaleError that says where.
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
from amp_graph.optim.torch_fused_update import kind_of

SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # a number for all elements of a parameter
OTHERWISE_SHAPED = (Adafactor, LBFGS)  # whose state is factored, or a history


def is_torchs(optimizer: Optimizer) -> bool:
    """Say whether ``optimizer`` is one of torch's, or of ours, which do as they: what others do is not known."""
    return kind_of(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of ``optimizer``, each with what its user knows it by."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            yield f"{name}, of shape {tuple(parameter.shape)}", parameter


def refuse_closures(caller: str, optimizer: Optimizer) -> None:
    """Raise ScaleError where ``optimizer.step()`` cannot do without a closure."""
    if _needs_closure(type(optimizer).step):
        raise ScaleError(
            f"{caller}: {type(optimizer).__name__}.step asks for a closure that computes gradients, which are "
            "computed and checked here before it is called\n  legal: an optimizer whose step() needs none\n"
            "  fix:   amp_graph.convert(model, 'bf16') without a loss scale, and optimizer.step(closure)"
        )


@cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_hooks(optimizer: Optimizer) -> None:
    """Raise CaptureError where a parameter has a hook for its gradient, which a graph would pass by."""
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for g in optimizer.param_groups for p in g["params"]):
        named = named_parameters(optimizer)
        name = next(name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks)
        raise CaptureError(
            f"TrainStep: a hook waits for the gradient of {name}, and the gradients of a step exist inside of its "
            "graph alone\n  legal: clip_norm=, clip_value=; hooks on tensors that forward computes\n"
            "  fix:   amp_graph.convert(model) with amp_graph.GradScaler, where hooks of parameters run"
        )


def refuse_state_of_another_model(caller: str, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Raise ScaleError where ``given``, a ``state_dict``, has state in other shapes than the parameters it is for."""
    keys = chain.from_iterable(group["params"] for group in given.get("param_groups", ()))  # torch says what is missing
    states = given.get("state", {})
    _refuse(caller, optimizer, (states.get(key, {}) for key in keys))


def refuse_own_state(caller: str, optimizer: Optimizer) -> None:
    """Raise ScaleError where the state that ``optimizer`` has is that of another model: loaded into it before."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    _refuse(caller, optimizer, (optimizer.state.get(p, {}) for p in params))


def _refuse(caller: str, optimizer: Optimizer, states: Iterable[Mapping[str, Any]]) -> None:
    """Look at torch's own optimizers, whose state has the shape of its parameter; what others keep is not known."""
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
