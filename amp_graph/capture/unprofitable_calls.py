"""The calls of a converted model that run as they are written, as low precision would not pay there.

Such a call may take 20 us, so the one most like the last is told by a single look of C++ at its tensor (the guard that
Dynamo has for tensors); all others are told by their kind: what decides about time, and nothing else, as what is
written is right for any call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.passes.torch_compat.dynamo_frames import tensor_guard

Kind = tuple[Any, ...]
# Whether the model trains, whether gradients are recorded, and what says whether a call's tensor is as it was.
Last = tuple[bool, bool, Callable[[Tensor], bool]]


@dataclass
class CallsLeftAlone:
    """The kinds of calls of ``model`` that are left alone; ``last``: the last of them, where one tensor was given."""

    model: torch.nn.Module
    kinds: dict[Kind, Last | None] = field(default_factory=dict)
    last: Last | None = None

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave calls like this one alone; not those whose sizes are symbols, or that have nested tensors."""
        kind = _kind_of(self.model, args, kwargs)
        if kind is not None:
            self.kinds[kind] = None

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether a call is of a kind that is left alone; it is the last one, then."""
        kind = _kind_of(self.model, args, kwargs)
        if kind not in self.kinds:
            return False
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            self.last = self._looked_at(kind, args[0])
        return True

    def _looked_at(self, kind: Kind, one: Tensor) -> Last | None:
        """Return what tells calls like this one at a look.

        Autocast is seen by it where it is on for the tensor's own kind of device, so that all must be on that one.
        """
        known = self.kinds[kind]
        if known is None or not known[2](one):  # other strides, or inference mode
            devices = {one.device.type, *(parameter.device.type for parameter in self.model.parameters())}
            if len(devices) == 1 and one.layout is torch.strided:
                known = self.kinds[kind] = (self.model.training, torch.is_grad_enabled(), tensor_guard(one))
        return known


def _kind_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """Return what calls have in common that run as they are written; None where their sizes are not plain numbers."""
    found = _common(args, kwargs)
    if found is None:
        return None
    kind = (model.training, torch.is_grad_enabled(), found)
    try:
        hash(kind)
    except TypeError:  # a symbolic size
        return None
    return kind


def _common(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    kind: list[Any] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, Tensor):
            if one.is_nested:
                return None
            kind += (one.shape, one.device)
        elif type(one) in (list, tuple, dict):
            inside = _common(tuple(tree_leaves(one)), {})
            if inside is None:
                return None
            kind.append(inside)
        else:
            kind.append(one if isinstance(one, bool) else type(one))
    return tuple(kind)
