"""What the core must know of functions that passes put into graphs; the module that defines a function says it here.

Before: a list in the core of every function and module of the backends. After: ``own_functions(__name__)`` at the top
of a module, ``declare(pointwise_conv, fp32_weight_gradient=True)`` below a function; ``traits_of(node.target)``.

A function that no module declares has no traits: the core treats it as any operation that the user called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

Function = Callable[..., Any]


@dataclass(frozen=True)
class Recomputable:
    """How ``RecomputeActivations`` treats a function.

    kind: "relu", "gelu", ... where its result may be computed again for those who read it; "" where only the result of
    a relu behind it is. norm: it saves its input and statistics alone, of which that relu is computed. replacement: the
    function whose result can be computed again; None for one that is such a function. keeps: the replacement where the
    result is saved, and others are computed from it. rewrite: edits the arguments of a node for ``replacement``.
    aliases: the nodes that hold the value, where that is one of several results. summand: the argument that is added to
    the norm before the relu. thorough: only where more than the cheapest is computed again. cost: see ``_cost``.
    """

    kind: str = ""
    norm: bool = False
    replacement: Function | None = None
    keeps: Function | None = None
    rewrite: Callable[[Node], None] | None = None
    aliases: Callable[[Node], tuple[Node, ...]] | None = None
    summand: int | None = None
    thorough: bool = False
    cost: str = ""


@dataclass(frozen=True)
class Traits:
    """What is known of a function.

    fp32_weight_gradient: its backward returns the gradient of its weight in fp32, where compiled C makes it.
    saves: says of a call, and of a node that it reads, whether that is saved for backward; None where it is not known.
    recomputable: how its result is computed again in backward.
    """

    fp32_weight_gradient: bool = False
    saves: Callable[[Node, Node], bool] | None = None
    recomputable: Recomputable | None = None


# Operations that return one gradient for their weight, by name. What is not named may read its weight several times, as
# an LSTM's steps do.
ONE_WEIGHT_GRADIENT: set[str] = {
    f"aten.{name}" for name in ("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d")
}
_NONE = Traits()
_traits: dict[Any, Traits] = {}
_own: set[str] = set()  # modules whose functions are ours; by module, as closures are made for each model
_cached: set[str] = set()


def own_functions(module: str, *, cached_weights: bool = False) -> None:
    """Say of all functions of ``module`` that they have no ATen identity, and are not run on fake tensors to check.

    ``cached_weights``: a call that replaced a cast reads a low-precision copy of a weight that outlives the call.
    """
    _own.add(module)
    if cached_weights:
        _cached.add(module)


def declare(function: Function, **traits: Any) -> None:
    """Add ``traits``, the fields of ``Traits``, to what is known of ``function``."""
    _traits[function] = replace(_traits.get(function, _NONE), **traits)


def traits_of(target: Any) -> Traits:
    """Return what is known of a node's target."""
    return _traits.get(target, _NONE) if callable(target) else _NONE


def is_own(target: Any) -> bool:
    """Say whether ``target`` is a function of a module that called ``own_functions``."""
    return getattr(target, "__module__", "") in _own


def reads_cached_weight(target: Any) -> bool:
    """Say whether ``target``, in the place of a cast, reads a copy of a weight that outlives the call."""
    return getattr(target, "__module__", "") in _cached
