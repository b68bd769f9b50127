"""Read the arguments of attention, batch norm and dropout calls, in all their spellings; and recognize transposes.

Before: ``batch_norm(x, mean, var, weight, bias, True)``. After: ``{"input": x, ..., "training": True, "eps": 1e-5}``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import captured
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.match import one_reader
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16
from amp_graph.passes.torch_compat.fake import same

# -- attention ----------------------------------------------------------------------------------------

SDPA = torch.ops.aten.scaled_dot_product_attention.default
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def keywords_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an attention call that differ from the defaults."""
    defaults = node_info.schema_arguments(SDPA, (None,) * 3, {})
    return {
        name: given[name]
        for name in ATTENTION_ARGUMENTS[3:]
        if given[name] is not None and given[name] != defaults[name]
    }


def attention_kernel_is_profitable(device: str, dtype: torch.dtype, queries: int | None = None) -> bool:
    """Say whether our C attention kernels, forward and backward, beat torch's kernel.

    ``queries``: the number of queries if no gradients are needed, else None.

    Speedups, bf16 on CPU, one thread, 16 to 2,048 tokens, causal or not (``benchmarks/attention.py``). Dot products:
    forward 2.1 to 3.8 (one query: 5 to 7), backward 2 to 17, and 2.4 to 5 over torch's matmuls. AMX: forward 1.2 to 2.4
    (2 to 16 queries: 1.1 to 1.6, one: 0.5 to 0.8), backward 2 to 31, and 3.7 to 8 over matmuls.
    """
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() and (queries != 1 or not cpu_has_amx())


# -- batch norm ---------------------------------------------------------------------------------------

BATCH_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
BATCH_NORM_DEFAULTS: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
RELUS = (("aten.relu",), ("aten.relu_",))  # operations that are fused into a batch norm before them


def batch_norm_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of ``F.batch_norm`` by name."""
    return BATCH_NORM_DEFAULTS | dict(zip(BATCH_NORM_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)


def has_norm(node: Node) -> bool:
    """Say whether the only reader of ``node`` is a batch norm in eval mode."""
    user = one_reader(node)
    return user is not None and user.target is F.batch_norm and batch_norm_arguments(user)["training"] is False


# -- dropout ------------------------------------------------------------------------------------------


def given_to(node: Node) -> dict[str, Any] | None:
    """Return the arguments of a dropout that is not in place; None for other nodes."""
    is_dropout = names_of(node) == ("aten.dropout",) and node_info.calls_torch(node)
    return arguments_of(node) if is_dropout else None


# -- transposes ---------------------------------------------------------------------------------------

ATEN: Any = torch.ops.aten
# Names in captured graphs. All of them return views, for any dimensions.
TRANSPOSES = frozenset({
    "aten.transpose", "aten.permute", "aten.t", "aten.mT", "aten.numpy_T", "aten.swapaxes", "aten.swapdims",
    "aten.movedim", "aten.moveaxis",
})  # fmt: skip
# Their forms in flat graphs of ATen operators.
FLAT_TRANSPOSES = (ATEN.t.default, ATEN.permute.default, ATEN.transpose.int)


def transposes(node: Node) -> bool:
    """Say whether ``node`` is one operation that permutes dimensions; its value shows which ones."""
    names = names_of(node)
    return len(names) == 1 and names[0] in TRANSPOSES


def swaps_last_two(node: Node) -> bool:
    """Say whether ``node``, as captured, is a view of its operand with the last two dimensions swapped."""
    if not transposes(node) or len(node.all_input_nodes) != 1:
        return False
    a, b = captured(node.all_input_nodes[0]), captured(node)
    return a.dim() >= 2 and same(a.mT.shape, b.shape) and same(a.mT.stride(), b.stride())
