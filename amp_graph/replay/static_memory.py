"""Copies tensors into memory of a recording, and out of it, layout included.

Before: ``x`` of the user, at another address in each call. After: ``twin_of(x)``, memory of the same layout, which
``fill`` overwrites at each call. Results leave by ``copies``, hundreds of gradients by a few kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.operators import foreach_copy_


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


def copies(tensors: Sequence[Any]) -> list[Any]:
    """Return a copy of each tensor, each in memory of its own, with the same strides; None stays None.

    One call of torch copies all of one dtype, because a call for each would take the host longer than the kernels run.
    """
    found = []
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if tensor is None or not _is_dense(tensor):
            found.append(None if tensor is None else copied(tensor))
            continue
        made = torch.empty_like(tensor)
        targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
        targets.append(made)
        sources.append(tensor)
        found.append(made)
    for targets, sources in by_dtype.values():
        foreach_copy_(targets, sources)
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the elements of ``tensor`` fill their memory, in any order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with one element along each expanded dimension: the others are the same memory."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
