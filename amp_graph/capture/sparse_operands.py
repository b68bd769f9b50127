"""Sparse tensors in code that escapes capture, as Dynamo captures none of them: their operations run in fp32.

Before: ``adjacency @ linear(x)`` under ``torch.autocast``, which casts both operands to a precision that sparse kernels
lack. After: the product in fp32, and all around it as under autocast.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.capture.dynamo_backend import Runner
from amp_graph.capture.graph_break_autocast import WholeOnly
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.precision.fp32_operands import DENSE
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener

REFUSED = "the model is given or holds sparse tensors, which torch.compile does not capture"
WHY = "operations on sparse tensors run in fp32, as they have few kernels for less"
MAKES = re.compile(r"to_sparse|sparse_\w+_tensor")  # functions that make sparse tensors of dense ones


def is_sparse(leaf: Any) -> bool:
    """Say whether ``leaf`` is a tensor whose kernels want full precision."""
    return isinstance(leaf, Tensor) and leaf.layout not in DENSE


def holds_sparse(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call of ``model`` reads sparse tensors that it is given or has."""
    return any(map(is_sparse, (*tree_leaves((args, kwargs)), *model.buffers(), *model.parameters())))


def with_sparse_in_full(
    pieces: Runner, as_written: Callable[..., Any], model: torch.nn.Module, whole: WholeOnly, log: CaptureListener
) -> Runner:
    """Return what runs ``pieces``, and where a call reads or makes sparse tensors ``as_written``; tell ``log`` why."""
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
    """While it is on, autocast is off in functions that take or make sparse tensors, and dense operands are widened.

    Their results are fp32, which autocast casts again where it wants to.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not MAKES.match(getattr(func, "__name__", "")) and not any(map(is_sparse, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    """Return what autocast made low in fp32; a low sparse tensor is the user's own."""
    return tensor.float() if tensor.dtype in HALVES and not is_sparse(tensor) else tensor
