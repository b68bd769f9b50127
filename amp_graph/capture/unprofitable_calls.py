"""Runs calls uncaptured, in fp32, for which low precision is not profitable.

Such a call may take 20 us. So a call like the last one is recognized by a single C++ check of its tensor (Dynamo's
tensor guard). Others are recognized by their kind: the properties that decide the run time, and the dtypes:
half inputs may not run as written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.passes.torch_compat.dynamo_entries import tensor_guard

Kind = tuple[Any, ...]
# Whether the model trains, whether gradients are recorded, and the check of the call's tensor.
Last = tuple[bool, bool, Callable[[Tensor], bool]]


@dataclass
class CallsLeftAlone:
    """The kinds of calls of ``model`` that run uncaptured; ``last``: the last, if its only argument was a tensor."""

    model: torch.nn.Module
    kinds: dict[Kind, Last | None] = field(default_factory=dict)
    last: Last | None = None

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run calls like this one uncaptured, unless sizes are symbolic or tensors nested."""
        kind = _kind_of(self.model, args, kwargs)
        if kind is not None:
            self.kinds[kind] = None

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call is of a recorded kind; it becomes ``last`` then."""
        kind = _kind_of(self.model, args, kwargs)
        if kind not in self.kinds:
            return False
        if len(args) == 1 and not kwargs and type(one := args[0]) is Tensor:
            self.last = self.kinds[kind]
            if self.last is None or not self.last[2](one):  # non-contiguous, or inference mode
                # The check covers autocast for the tensor's own device only: all tensors must be on that.
                devices = {one.device.type, *(parameter.device.type for parameter in self.model.parameters())}
                if len(devices) == 1 and one.layout is torch.strided:
                    self.last = self.kinds[kind] = (*kind[:2], tensor_guard(one))
        return True


def _kind_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """Return the kind of a call, by which it is recognized; None if its sizes are not plain numbers."""
    try:
        kind = (model.training, torch.is_grad_enabled(), _common(args, kwargs))
        hash(kind)
    except TypeError:  # a symbolic size, or a nested tensor
        return None
    return kind


def _common(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    """Return the part of a kind that the arguments make. Raises TypeError for a nested tensor."""
    kind: list[Any] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, Tensor):
            if one.is_nested:
                raise TypeError("a nested tensor has no sizes")
            kind += (one.shape, one.dtype, one.device)
        elif type(one) in (list, tuple, dict):
            kind.append(_common(tuple(tree_leaves(one)), {}))
        else:
            kind.append(one if isinstance(one, bool) else type(one))
    return tuple(kind)
