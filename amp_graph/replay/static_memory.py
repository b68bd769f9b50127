"""Copies tensors into memory of a recording, and out of it, layout included.

Before: ``x`` of the user, at another address in each call. After: ``twin_of(x)``, memory of the same layout, which
``fill`` overwrites at each call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def twin_of(tensor: Tensor) -> Tensor:
    """Return new memory with the sizes and strides of ``tensor``, which may be expanded."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def fill(twin: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``twin``."""
    _unexpanded(twin).copy_(_unexpanded(source))


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    made = twin_of(tensor)
    fill(made, tensor)
    return made


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with one element along each expanded dimension: the others are the same memory."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
