"""The kernels that a call of an operator launches on CUDA, and the bytes that it reads and writes.

Before: a node of a flat graph, ``aten._foreach_copy_([a, b], [c, d])``. After: ``kernels(node) == 1`` if the strides of
``a`` and ``c`` and of ``b`` and ``d`` are the same, else 2; ``moved(node)``: the bytes of all four.

One table for every policy. A call of cuBLAS, cuDNN or a flash kernel counts once, whatever the library launches. An
operator that the table does not name counts once. Sources: aten/src/ATen/native/cuda of torch 2.13; none was counted on
a GPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import Node

# Calls without a kernel that their schemas do not show as views.
NONE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh_copy",
        "sym_size", "sym_numel", "sym_stride", "device"}  # fmt: skip
# What is written without being read first.
OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_"}
# Operators that read as many elements of their first operand as they return, or one a row.
GATHERS = {"embedding", "index", "gather", "_embedding_bag", "nll_loss_forward", "nll_loss2d_forward"}
# Multi-tensor kernels: tensors and blocks per launch, elements per block (MultiTensorApply.cuh, 4 KB of arguments).
TENSORS, BLOCKS, CHUNK = {1: 110, 2: 64, 3: 48}, 320, 65536


def name_of(node: Node) -> str:
    """Return the operator's name without its overload, "" for what is no operator."""
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def launches(node: Node) -> bool:
    """Say whether ``node`` runs anything on the GPU."""
    target, name = node.target, name_of(node)
    if node.op != "call_function" or not name or name in NONE or torch.Tag.inplace_view in target.tags:  # type: ignore[union-attr]
        return False
    return not any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)  # type: ignore[union-attr]


def kernels(node: Node) -> int:
    """Return how many kernels ``node`` launches."""
    if not launches(node):
        return 0
    name = name_of(node)
    if name.startswith("_foreach_"):
        return _foreach(name, [list(map(_value, a)) for a in node.args if isinstance(a, Sequence)])
    found = KERNELS.get(name, 1)
    return found if isinstance(found, int) else found(node)


def moved(node: Node) -> int:
    """Return the bytes that ``node`` reads and writes: every operand and every result once."""
    if not launches(node):
        return 0
    name, schema = name_of(node), node.target._schema  # type: ignore[union-attr]
    read, written = 0, sum(map(_size, _tensors(_value(node)))) * (not _writes(schema.returns))
    for argument, given in zip(schema.arguments, node.args, strict=False):
        size = sum(map(_size, _tensors(_value(given))))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += size * is_written
        read += size * (not (is_written and name in OVERWRITES) and not (name in GATHERS and argument.name in _TABLES))
    return read + written * (2 if name in GATHERS else 1)


_TABLES = ("self", "weight", "input")


def _writes(returns: Sequence[Any]) -> bool:
    """Say whether the results are operands that were written."""
    return any(r.alias_info is not None and r.alias_info.is_write for r in returns)


def _value(given: Any) -> Any:
    if isinstance(given, Node):
        return given.meta.get("val")
    return [_value(g) for g in given] if isinstance(given, list | tuple) else given


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for f in found for t in _tensors(f)] if isinstance(found, list | tuple) else []


def _size(tensor: Tensor) -> int:
    """Return the bytes of the elements of ``tensor``; those of an expanded dimension once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.itemsize


def _foreach(name: str, lists: list[list[Tensor]]) -> int:
    """Return the kernels of a call on lists of tensors: a few, or one a tensor (ForeachUtils.h, can_use_fast_route)."""
    first = lists[0]
    alike = all(
        a.shape == b.shape and a.stride() == b.stride() for one in lists[1:] for a, b in zip(first, one, strict=True)
    )
    same = all(len({t.dtype for t in one}) == 1 for one in lists)
    if not (alike and same and all(is_non_overlapping_and_dense_or_false(t) for t in first)):
        return len(first)
    tensors = blocks = found = 0
    for size in (t.numel() for t in first if t.numel()):
        tensors += 1
        for chunk in range(of := -(-size // CHUNK)):
            blocks += 1
            full = tensors == TENSORS.get(len(lists), 48) and chunk == of - 1
            if full or blocks == BLOCKS:
                found, blocks, tensors = found + 1, 0, int(chunk < of - 1)
    return found + (blocks > 0)


def _mask(node: Node) -> int:
    """Return the number of gradients that are asked for, each by a kernel of its own."""
    return sum(bool(wanted) for wanted in node.args[-1])  # type: ignore[union-attr,arg-type]


def _norm_gradients(node: Node) -> int:
    x, *others = node.args[-1]  # type: ignore[misc]
    return bool(x) + any(others)


def _convolution(node: Node) -> int:
    return 1 + (node.args[2] is not None)  # cuDNN's, and the sum with the bias


def _weights(node: Node) -> int:
    """Return the copies of the weights of a recurrent layer into one piece, and the call of cuDNN."""
    return len(node.args[3]) + 1  # type: ignore[arg-type]


KERNELS: dict[str, int | Callable[[Node], int]] = {
    "convolution": _convolution,
    "convolution_backward": _mask,
    "native_layer_norm_backward": _norm_gradients,
    "rms_norm_backward": _norm_gradients,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,  # a dot product, the gradients, a cast of q's
    # A fill with zeros, and what is written into them.
    **dict.fromkeys(("embedding_dense_backward", "nll_loss_backward", "nll_loss2d_backward", "select_backward",
                     "slice_backward", "constant_pad_nd", "index_put", "max_pool2d_with_indices_backward"), 2),
    "cudnn_rnn": _weights,
    "cudnn_rnn_backward": 5,  # a copy of what cuDNN kept, a fill, its two calls, one copy of all weights' gradients
    "autocasts_rnn": 1,
    "autocasts_rnn_backward": 3,  # a fill of the weights' gradients, and cuDNN's two calls
}  # fmt: skip
