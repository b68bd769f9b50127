"""Traits of the functions that passes insert into graphs, declared by the module that defines each function.

Before: a list in the core of every function and module of the backends. After: ``own_functions(__name__)`` at the top
of a module, ``declare(norm_add_relu, Traits(saves=...))`` below a function; ``traits_of(node.target)``.

A function without a declaration has no traits: the core treats it like any operation that the user called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

Function = Callable[..., Any]


@dataclass(frozen=True)
class Traits:
    """The traits of a function: what autograd saves of a call, and how ``RecomputeActivations`` treats it.

    saves: tells for a call and one of its inputs whether that input is saved for backward; None if unknown.
    kind: "relu", "gelu", ... if its result may be recomputed for its readers; "" if only the result of a relu after it
    may. norm: it saves only its input and statistics, from which that relu is recomputed. replacement: the function
    whose result can be recomputed; None if the function itself is one. keeps: the replacement if the result is saved
    and others are recomputed from it. summand: the argument that is
    added to the norm before the relu.
    """

    saves: Callable[[Node, Node], bool] | None = None
    kind: str = ""
    norm: bool = False
    replacement: Function | None = None
    keeps: Function | None = None
    summand: int | None = None


NO_TRAITS = Traits()
_traits: dict[Any, Traits] = {}
_own: set[str] = set()  # modules whose functions are ours; by module, as closures are made for each model
_frozen: set[str] = set()


def own_functions(module: str, *, frozen_weights: bool = False) -> None:
    """Declare that the functions of ``module`` have no ATen identity; the checker does not run them on fake tensors.

    ``frozen_weights``: a call that replaces a cast reads what a frozen model keeps of a weight.
    """
    _own.add(module)
    if frozen_weights:
        _frozen.add(module)


def declare(function: Function, traits: Traits) -> None:
    """Declare the traits of ``function``."""
    _traits[function] = traits


def traits_of(target: Any) -> Traits:
    """Return the traits of a node's target."""
    return _traits.get(target, NO_TRAITS) if callable(target) else NO_TRAITS


def is_own(target: Any) -> bool:
    """Say whether ``target`` is a function of a module that called ``own_functions``."""
    return getattr(target, "__module__", "") in _own


def reads_frozen_weight(target: Any) -> bool:
    """Say whether ``target``, which replaces a cast, reads what a frozen model keeps of a weight."""
    return getattr(target, "__module__", "") in _frozen
