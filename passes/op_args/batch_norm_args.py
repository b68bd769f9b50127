"""Read the arguments of ``F.batch_norm``.

Before: ``batch_norm(x, mean, var, weight, bias, True)``. After: ``{"input": x, ..., "training": True, "eps": 1e-5}``.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.fx import Node

ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
DEFAULTS: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
RELUS = (("aten.relu",), ("aten.relu_",))  # operations that are fused into a batch norm before them


def batch_norm_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of ``F.batch_norm`` by name."""
    return DEFAULTS | dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)


def has_norm(node: Node) -> bool:
    """Say whether the only reader of ``node`` is a batch norm in eval mode."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.target is not F.batch_norm:
        return False
    return batch_norm_arguments(user)["training"] is False
