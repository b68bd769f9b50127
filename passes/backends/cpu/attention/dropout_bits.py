"""Dropout of attention's probabilities: which of them torch's dropout keeps, a bit each.

Before: ``dropout(probabilities, 0.1)``, of probabilities that attention kernels do not store.
After: ``dropout_bits(queries, 0.1, keys)``, of the same draws of torch's generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_graph.passes.native.operator_library import define_as_typed

PADDING = 16  # bytes after the bits, some of which kernels read with the last


def dropout_bits(x: Tensor, p: float, keys: int = 1) -> Tensor:
    """Return which elements a dropout of ``p`` of a contiguous [*x.shape, keys] keeps: bits, and padding: uint8."""
    count = x.numel() * keys
    kept = torch.zeros(-(-count // 8), 8, dtype=torch.uint8, device="cpu")
    kept.view(-1)[:count].bernoulli_(1 - p)
    bits = (kept << torch.arange(8, dtype=torch.uint8, device="cpu")).sum(1, dtype=torch.uint8)
    return torch.cat([bits, bits.new_zeros(PADDING)])


def kept_of(bits: Tensor, count: int) -> Tensor:
    """Return ``count`` bits as booleans: bool [count]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> places & 1).flatten()[:count].to(torch.bool)


define_as_typed(
    dropout_bits,
    lambda x, keys: x.new_empty(-(-x.numel() * keys // 8) + PADDING, dtype=torch.uint8),
    (torch.Tag.nondeterministic_seeded,),
)
