"""Lower attention to compiled C.

Before: ``scaled_dot_product_attention(q, k, v, is_causal=True)`` in bf16 on CPU.
After: ``attention_low(q, k, v, is_causal=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low, by_formula
from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph.call_arguments import ATTENTION_ARGUMENTS, SDPA, attention_kernel_is_profitable, keywords_of
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import arguments_of, names_of, operations_of
from amp_graph.passes.graph.meta_keys import MARK, REGION, WRITTEN_OUT
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.native.gemm_thresholds import LEAST_OF_LIBRARY
from amp_graph.passes.precision.decompose_composites import expand
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size


@dataclass(frozen=True)
class Attention(NodePass):
    """Replaces ``scaled_dot_product_attention`` with ``attention_low`` when it is profitable.

    Law: SDPA's. Exactness: rounding-equal, with the kernel's fp32 scores and probabilities, summed in another order;
    dropout draws what torch's draws. Training with an additive mask that our kernel does not take is computed by the
    formula, in fp32.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Replace an attention that trains, or that is a part of ``node``."""
        if _hides_attention(node):
            node = next(filter(_is_attention, expand(gm, node, frozenset(), mode) or ()), node)
        if not _is_attention(node) or not (is_trained(node) or _by_ours(node)):
            return None
        given = arguments_of(node)
        if given is None:
            return Skip(node.name, "it is called through a function with other arguments")
        reason = _why_not(given, node)
        if reason and not _is_worse_fused(node, given["attn_mask"]):
            return Skip(node.name, reason)
        node.op, node.target = "call_function", by_formula if reason else attention_low
        node.args, node.kwargs = tuple(given[name] for name in ATTENTION_ARGUMENTS[:3]), keywords_of(given)
        if reason:
            why = "its mask may hide rows, where torch's backward is inexact"
            return Change(self.name, "by the formula", node.name, why)
        return Change(self.name, "own kernel", node.name, "torch's CPU kernel is slower in bf16")


def _hides_attention(node: Node) -> bool:
    """Say whether ``node`` is fused attention with its projections, for which ours computes the dropout, too."""
    operations = operations_of(node)
    parts = len(operations) > 1 and any(o.op is SDPA for o in operations)
    return parts and REGION not in node.meta and _by_ours(node)


def _is_attention(node: Node) -> bool:
    if node.op != "call_function" or node.target is attention_low or REGION in node.meta:
        return False
    return names_of(node) == ("aten.scaled_dot_product_attention",)


def _by_ours(node: Node) -> bool:
    made = next((t for t in tree_leaves(value(node)) if isinstance(t, torch.Tensor)), None)
    if made is None:
        return False
    queries = None if is_trained(node) or not _is_attention(node) else concrete_size(made.shape[-2])
    return attention_kernel_is_profitable(made.device.type, made.dtype, queries)


def _is_worse_fused(node: Node, mask: Any) -> bool:
    """Say whether torch's kernel would compute the gradients of rows that see nothing less accurately.

    It saves only the log-sum-exp of a row: if the lowest number is added to all scores, the rest is lost. What an fp16
    mask can hold loses nothing. For a mask that is trained torch takes no such kernel. An fp32 call of the user stays,
    but not one that the plan left in fp32.
    """
    made = value(node)
    if not isinstance(mask, Node) or is_trained(mask) or not is_trained(node) or made.device.type != "cpu":
        return False
    mark = node.meta.get(MARK)
    planned = WRITTEN_OUT in node.meta or (mark is not None and mark.cls is OpClass.ALLOW)
    return planned and value(mask).dtype not in (torch.bool, torch.float16)


def _why_not(given: dict[str, Any], node: Node) -> str:
    """Return why a call stays as it is, or ""."""
    drops = given["dropout_p"] != 0
    q, k = value(given["query"]), value(given["key"])
    if drops and not (isinstance(given["dropout_p"], float) and given["dropout_p"] < 1):
        return "its dropout draws random numbers inside the kernel"
    if q.dim() != 4 or not _by_ours(node):
        return f"no kernel of ours is faster for {q.dim()} dimensions in {q.dtype} on {q.device.type}"
    if drops or any(type(n) is not int for n in (*q.shape, *k.shape)):
        return ""
    heads, scores = q.shape[0] * q.shape[1], q.shape[-2] * k.shape[-2]
    if not is_trained(node):
        by_torch = heads <= FEW_HEADS and heads * scores <= FEW_SCORES
    else:
        few = heads * scores <= MOST_SCORES_OF_TORCH and scores * q.shape[-1] <= LEAST_OF_LIBRARY
        by_torch = few and not _is_worse_fused(node, given["attn_mask"])
    return "torch's kernel is faster for so few scores" if by_torch else ""


# Scores of all heads up to which torch's kernel is faster than ours, forward and backward. Our time over torch's: 1.8
# for 8 and 16 scores of width 16, 1.55 for 256, 1.3 for 512; 0.5 for 1,024 and 0.4 for 2,048 of width 64, whose
# products are so large that torch calls oneDNN for each.
MOST_SCORES_OF_TORCH = 512
# Heads of the whole batch, and scores of all heads, up to which torch's kernel is faster without gradients. bf16 on CPU
# with dot products, width 64: our call takes 20 us, and little more for 256 to 4,096 scores; torch's takes 5 us and
# 3 us per head. Torch's time over ours: 0.4 for one head of 16 x 16, 0.7 for four of 16 x 16 and two of 32 x 32, 1.0
# for four of 32 x 32, 1.2 for twelve of 16 x 16.
FEW_HEADS, FEW_SCORES = 4, 2048
