"""Lower attention to compiled C; or, where only that is profitable, compute its gradients by matmuls.

Before: ``scaled_dot_product_attention(q, k, v, is_causal=True)`` in bf16 on CPU.
After: ``attention_low(q, k, v, is_causal=True)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low, by_formula
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import Identity, arguments_of, names_of
from amp_graph.passes.graph.meta_keys import IDENTITY, MARK, REGION, WRITTEN_OUT
from amp_graph.passes.graph.node_info import is_zero
from amp_graph.passes.op_args.attention_args import NAMES, SDPA, keywords_of
from amp_graph.passes.precision.decompose_composites import expand
from amp_graph.passes.profitability.call_thresholds import torchs_trained_attention_is_profitable
from amp_graph.passes.profitability.thresholds import (
    attention_kernel_is_profitable,
    explicit_backward_is_profitable,
    torchs_attention_is_profitable,
)
from amp_graph.passes.torch_compat.fake import concrete_size


@dataclass(frozen=True)
class Attention(Pass):
    """Replaces ``scaled_dot_product_attention`` with ``attention_low`` when it is profitable.

    Law: SDPA's. Exactness: rounding-equal, with the kernel's fp32 scores and probabilities, summed in another order;
    dropout draws what torch's draws. Where our kernel does not run, only the gradients differ from torch's, and forward
    is bit-exact; inference, long sequences, dropout, and masks with gradients keep torch's. Training with an additive
    mask that no kernel of ours takes is computed by the formula, in fp32.
    """

    name: ClassVar[str] = "attention"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every attention that trains."""
        mode = fake_mode_of(gm)
        for node in list(gm.graph.nodes):
            if mode is not None and _hides_attention(node):
                expand(gm, node, frozenset(), mode)
        changes, skips = [], []
        for node in gm.graph.nodes:
            if not _is_attention(node) or not (is_trained(node) or _by_ours(node)):
                continue
            given = arguments_of(node, SDPA)
            if given is None:
                skips.append(Skip(node.name, "it is called through a function with other arguments"))
                continue
            reason = _why_not(given, node)
            if reason and not _is_worse_fused(node, given["attn_mask"]):
                skips.append(Skip(node.name, reason))
                continue
            target: Callable[..., Any] = by_formula if reason else attention_low
            if reason:
                action, reason = "by the formula", "its mask may hide rows, where torch's backward is inexact"
            else:
                action = "own kernel" if _by_ours(node) else "explicit backward"
                reason = "torch's CPU kernel is slower in bf16"
            node.op, node.target = "call_function", target
            node.args, node.kwargs = tuple(given[name] for name in NAMES[:3]), keywords_of(given)
            changes.append(Change(self.name, action, node.name, reason))
        return PassResult(gm, tuple(changes), tuple(skips))


def _hides_attention(node: Node) -> bool:
    """Say whether ``node`` is fused attention with its projections, for which ours computes the dropout, too."""
    identity = node.meta.get(IDENTITY)
    if not isinstance(identity, Identity) or len(identity.operations) < 2 or REGION in node.meta:
        return False
    inside = [o for o in identity.operations if o.op is SDPA]
    drops = not all(is_zero(o.arguments["dropout_p"]) for o in inside)
    return bool(inside) and (_by_ours(node) or (not drops and is_trained(node)))


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
    if drops and not (isinstance(given["dropout_p"], float) and given["dropout_p"] < 1 and _by_ours(node)):
        return "its dropout draws random numbers inside the kernel"
    query, key, mask = given["query"], given["key"], given["attn_mask"]
    if isinstance(mask, Node) and is_trained(mask) and not _by_ours(node):
        return "its mask is trained"
    q, k = value(query), value(key)
    sizes = concrete_size(q.shape[-2]), concrete_size(k.shape[-2])
    if q.dim() == 4 and _by_ours(node):
        heads = concrete_size(q.shape[0]) * concrete_size(q.shape[1])
        known = not drops and all(type(n) is int for n in (*q.shape, *k.shape))
        if not is_trained(node):
            by_torch = known and torchs_attention_is_profitable(heads, *sizes)
        else:
            known = known and not _is_worse_fused(node, mask)
            by_torch = known and torchs_trained_attention_is_profitable(heads, *sizes, q.shape[-1])
        return "torch's kernel is faster for so few scores" if by_torch else ""
    if q.dim() != 4 or not explicit_backward_is_profitable(q.device.type, q.dtype, *sizes):
        return f"the kernel is as fast for {sizes[0]} x {sizes[1]} tokens in {q.dtype} on {q.device.type}"
    return ""
