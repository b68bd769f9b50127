"""Runs operations on sparse tensors in fp32; Dynamo does not capture them, so they are uncaptured code.

Before: ``adjacency @ linear(x)`` under ``torch.autocast``, which casts both operands to a precision that sparse kernels
lack. After: the product runs in fp32, the code around it under autocast.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.graph_breaks.run_under_autocast import WholeOnly
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.precision.fp32_operands import DENSE
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, Runner

REFUSED = "the model takes or holds sparse tensors, which torch.compile does not capture"
WHY = "operations on sparse tensors run in fp32, as few have low-precision kernels"
MAKES = re.compile(r"to_sparse|sparse_\w+_tensor")  # functions that make sparse tensors from dense ones


def is_sparse(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor whose kernels need full precision."""
    return isinstance(leaf, Tensor) and leaf.layout not in DENSE


def holds_sparse(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``model`` reads sparse inputs, parameters or buffers."""
    return any(map(is_sparse, (*tree_leaves((args, kwargs)), *model.buffers(), *model.parameters())))


def with_sparse_in_full(
    pieces: Runner, as_written: Callable[..., Any], model: torch.nn.Module, whole: WholeOnly, log: CaptureListener
) -> Runner:
    """Wrap ``pieces``: calls that read or make sparse tensors run ``as_written``, and ``log`` records why."""
    told: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if whole.sparse is None and not holds_sparse(model, args, kwargs):
            return pieces(*args, **kwargs)
        if not told:
            reason, stack = whole.sparse or (REFUSED, None)
            told.append(reason)
            first, _, rest = reason.partition("\n")
            log.broke(f"{first}; {WHY}\n{rest}", stack)
        with SparseInFull():
            return as_written(*args, **kwargs)

    return call


class SparseInFull(TorchFunctionMode):
    """A mode that turns autocast off in functions that take or make sparse tensors, and upcasts their dense operands.

    Their results are fp32; autocast may cast them again later.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not MAKES.match(getattr(func, "__name__", "")) and not any(map(is_sparse, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    """Upcast dense tensors that autocast made low; a low sparse tensor was made by the user."""
    return tensor.float() if tensor.dtype in HALVES and not is_sparse(tensor) else tensor
