"""Counts the bytes of a model in training: parameters, gradients, masters, weight copies, optimizer state.

``memory_of(model, optimizer)`` at O2 with AdamW comes to 2 + 2 + 4 + 8 bytes for each parameter in low precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_graph.optim.master_weights import master_of
from amp_graph.passes.torch_compat.modules import is_uninitialized


def memory_of(model: torch.nn.Module, optimizer: Any = None, copies: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return bytes by kind, without kinds of 0 bytes.

    Gradients are counted for every parameter that trains, in its dtype, whether they exist at the moment or not;
    ``copies`` are the low-precision copies in the weight cache.
    """
    params = [p for p in model.parameters() if not is_uninitialized(p)]
    trained = [p for p in params if p.requires_grad]
    state = [t for s in optimizer.state.values() for t in s.values()] if optimizer is not None else []
    found = {
        "parameters": _bytes(params),
        "gradients": _bytes(trained),
        "masters": _bytes(m for p in params if (m := master_of(p)) is not None),
        "weight copies": _bytes(copies),
        "optimizer state": _bytes(t for t in state if isinstance(t, Tensor)),
    }
    return {kind: size for kind, size in found.items() if size}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
