"""Read a module's attributes without running its code: properties, parametrizations, ``__getattr__``.

Before: ``linear.weight``, which computes a parametrized weight, updates the buffers of a spectral norm, and raises if
the weight was deleted.
After: ``weights_of(linear)``, which yields what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy


def plain_attribute(module: Module, name: str, default: Any = None) -> Any:
    """Return the value that ``module``, or its class, stores under ``name``; ``default`` if code computes it."""
    if name in module.__dict__:
        return module.__dict__[name]
    kind = next((kind for kind in type(module).__mro__ if name in kind.__dict__), None)
    if kind is None or hasattr(type(kind.__dict__[name]), "__get__"):
        return default
    return kind.__dict__[name]


def is_uninitialized(tensor: Tensor) -> bool:
    """Say whether ``tensor`` has no shape yet: a parameter or buffer of a lazy module before its first call."""
    return is_lazy(tensor)


def weights_of(module: Module) -> Iterator[Tensor]:
    """Yield the stored parameters in ``module`` with two or more dimensions, also if parametrized or pruned."""
    for parameter in module.parameters():
        if not is_uninitialized(parameter) and parameter.dim() >= 2:
            yield parameter


def uninitialized(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the uninitialized parameters and buffers."""
    return [name for name, tensor in named if is_uninitialized(tensor)]
