"""Loads the state of an optimizer as a whole, or refuses it and changes nothing.

Before: torch takes ``{"lr": "x"}`` and a state without ``exp_avg``, and the next step fails with ``KeyError``. After:
one ScaleError that says where, and the optimizer as it was.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_graph.errors import ScaleError
from amp_graph.lists.errors import Attempt, shortened
from amp_graph.optim.check_optimizer import OTHERWISE_SHAPED, is_torchs, refuse_state_of_another_model


def load_or_refuse(caller: str, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Let ``optimizer`` load ``given``. Raises ScaleError, without a change, if it is not the state of such a one.

    What an optimizer with a ``load_state_dict`` of its own, such as Lookahead, saves is known to itself only.
    """
    plain = type(optimizer).load_state_dict is Optimizer.load_state_dict
    wrong = next(_unlike(optimizer, given), "") if plain else ""
    if wrong:
        raise ScaleError(_message(caller, wrong))
    refuse_state_of_another_model(caller, optimizer, given)
    before = optimizer.state, optimizer.param_groups
    with Attempt() as tried:
        optimizer.load_state_dict(dict(given))
        wrong = _missing_options(before[1], optimizer) if plain else ""
    if tried.error is not None:
        optimizer.state, optimizer.param_groups = before
        raise ScaleError(_message(caller, f"{type(tried.error).__name__}: {str(tried.error)[:300]}")) from tried.error
    if wrong:
        optimizer.state, optimizer.param_groups = before
        raise ScaleError(_message(caller, wrong))


def _message(caller: str, wrong: str) -> str:
    return (
        f"{caller}: the optimizer's state does not fit: {wrong}\n"
        "  legal: what state_dict() of an optimizer over the same model returned\n"
        "  fix:   load the checkpoint of this model"
    )


def _unlike(optimizer: Optimizer, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of ``given`` is not as in a state of ``optimizer``."""
    groups, states = given.get("param_groups"), given.get("state")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        yield f"'param_groups' is {shortened(groups, 60)}, not a list of dicts"
        return
    if not isinstance(states, Mapping) or not all(isinstance(one, Mapping) for one in states.values()):
        yield "'state' is not a dict of dicts"
        return
    if len(groups) != len(optimizer.param_groups):
        yield f"it has {len(groups)} groups of parameters, and the optimizer {len(optimizer.param_groups)}"
        return
    for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        keys = group.get("params")
        if not isinstance(keys, (list, tuple)) or len(keys) != len(own["params"]) or not all(map(_is_key, keys)):
            yield f"'params' of group {number} is {shortened(keys, 60)}, not a list of {len(own['params'])} numbers"
            return
        yield from _unlike_group(optimizer, number, group, own, [states.get(key, {}) for key in keys])


def _is_key(key: Any) -> bool:
    return isinstance(key, (int, str))


def _unlike_group(
    optimizer: Optimizer, number: int, group: Mapping[str, Any], own: Mapping[str, Any], states: list[Mapping[str, Any]]
) -> Iterator[str]:
    kind = type(optimizer)
    if not own["params"] or not is_torchs(optimizer) or issubclass(kind, OTHERWISE_SHAPED):
        return
    if isinstance(_one_step(kind, own, own["params"][0]), Exception):
        return  # an optimizer that takes no step like that, such as a sparse one
    made = _one_step(kind, group, own["params"][0])
    if isinstance(made, Exception):
        yield f"the options of group {number} are refused: {str(made)[:200]}"
        return
    for at, state in enumerate(states):
        for name, expected in made.items() if state else ():
            if name not in state:
                yield f"parameter {at} of group {number} has no {name!r}"
            elif isinstance(expected, Tensor) and not _is_like(state[name], name, kind, own["params"][at]):
                yield f"{name!r} of parameter {at} of group {number} is {shortened(state[name], 60)}"


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
    if tried.error is not None:
        return tried.error
    return made.state[tiny]


def _missing_options(before: list[dict[str, Any]], optimizer: Optimizer) -> str:
    for number, (own, group) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        missing = [name for name in own if name not in group and name != "param_names"]
        if missing:
            return f"group {number} has no {missing[0]!r}"
    return ""
