"""Trace one node into its own small graph of ATen operations; and decompositions of operators that torch keeps whole.

Before: ``multi_head_attention_forward(x, ...)``, one call of the user. After: ``aten.linear``, ``aten.baddbmm``, ...,
with placeholders for its tensors. Fused operators of inference (``_transformer_encoder_layer_fwd``), for which torch
has no decomposition, and products that add a value, have one here: each part has its own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from amp_graph.passes.graph.fake_values import argument_values, call_node
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import (
    SYMBOLIC,
    FakeTensorMode,
    concrete_number,
    empty_of_numbers,
    make_fx,
    tracing_fake,
)
from amp_graph.passes.torch_compat.operators import ENCODER_LAYER


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Return the result of ``aten::_transformer_encoder_layer_fwd`` for a dense ``src`` [batch, length, embed_dim].

    mask: True hides a position; a floating-point mask is added to the scores, as in training. (The operator treats any
    number but 0 as True: the same for -inf, NaN for most other numbers.) mask_type 0: [length, length], 1:
    [batch, length], 2: full shape.
    Source: aten/src/ATen/native/transformers/transformer.cpp.
    """
    seen = None
    if mask is not None:
        seen = mask if mask.is_floating_point() else mask.to(torch.bool).logical_not()
        seen = seen[None, None] if mask_type == 0 else seen[:, None, None, :] if mask_type == 1 else seen

    def attend(x: Tensor) -> Tensor:
        parts = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=seen)
        return F.linear(out.transpose(1, 2).flatten(-2), proj_weight, proj_bias)

    def feed(x: Tensor) -> Tensor:
        h = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(h) if use_gelu else F.relu(h), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        src = src + attend(norm_1(src))
        return src + feed(norm_2(src))
    src = norm_1(src + attend(src))
    return norm_2(src + feed(src))


def added_to_product(addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return the result of ``aten::baddbmm`` and ``aten::addmm`` by a product and a sum; beta 0 ignores ``addend``."""
    if beta == 0:
        return (a @ b) * alpha
    return torch.add(addend if beta == 1 else addend * beta, a @ b, alpha=alpha)


ADDING = (torch.ops.aten.baddbmm.default, torch.ops.aten.addmm.default)
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    ENCODER_LAYER: encoder_layer,
    **dict.fromkeys(ADDING, added_to_product),
}


def trace_node(node: Node, mode: FakeTensorMode, decompose: frozenset[OpOverload]) -> GraphModule:
    """Return the node's own small graph of ATen operations, one placeholder per tensor argument and symbolic number."""
    flat, spec = tree_flatten(argument_values(node))
    places: dict[int, list[int]] = {}
    for i, leaf in enumerate(flat):
        if isinstance(leaf, (torch.Tensor, torch.SymInt)):
            places.setdefault(id(leaf), []).append(i)

    def call(*given: torch.Tensor) -> Any:
        leaves = list(flat)
        for same, tensor in zip(places.values(), given, strict=True):
            for place in same:
                leaves[place] = tensor
        return call_node(node, *tree_unflatten(leaves, spec))

    table = {op: DECOMPOSITIONS.get(op, op.decompose) for op in decompose}
    with tracing_fake(mode):
        # Detached: in the user's no_grad, an in-place operation on a leaf that requires a gradient is legal.
        given = [f.detach() if isinstance(f := flat[same[0]], torch.Tensor) else f for same in places.values()]
        return make_fx(call, pre_dispatch=True, decomposition_table=table)(*given)


def argument_leaves(node: Node, mode: FakeTensorMode, *, symbolic: bool) -> tuple[list[Any], TreeSpec, FakeTensorMode]:
    """Return the leaves of the node's arguments, their structure, and the fake mode of their tensors.

    Without ``symbolic``, sizes are numbers, in a separate fake mode: they do not decide which operations run, and
    tracing must not add guards to the user's sizes.
    """
    flat, spec = tree_flatten(argument_values(node))
    if not symbolic and any(_is_symbolic(leaf) for leaf in flat):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        once = {id(leaf): _concrete(leaf, mode) for leaf in flat}
        flat = [once[id(leaf)] for leaf in flat]
    return flat, spec, mode


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*leaf.shape, *leaf.stride()))
    if isinstance(leaf, slice):
        return any(_is_symbolic(part) for part in (leaf.start, leaf.stop, leaf.step))
    return isinstance(leaf, SYMBOLIC)


def _concrete(leaf: Any, mode: FakeTensorMode) -> Any:
    """Return ``leaf`` in ``mode``, with numbers for its symbolic sizes."""
    if isinstance(leaf, SYMBOLIC):
        return concrete_number(leaf)
    if isinstance(leaf, slice):
        return slice(*(_concrete(part, mode) for part in (leaf.start, leaf.stop, leaf.step)))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        return empty_of_numbers(leaf)
