"""Give attention that trains a backward made of matrix products, where the kernel's own is slower.

Before: ``scaled_dot_product_attention(q, k, v, is_causal=True)`` in bf16 on CPU. After: ``attention_low(q, k, v,
is_causal=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes import facts
from amp_graph.passes.attention_backward import attention_low
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.expand import expand
from amp_graph.passes.identify_ops import OPS, Identity, names_of
from amp_graph.passes.node_value import fake_mode_of, value
from amp_graph.passes.regions import REGION, is_trained
from amp_graph.passes.torch_private import concrete_size
from amp_graph.passes.what_pays import explicit_backward_pays

SDPA = torch.ops.aten.scaled_dot_product_attention.default
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Attention(Pass):
    """Replaces ``scaled_dot_product_attention`` with ``attention_low`` when it trains and ``what_pays`` says so.

    Law: without dropout, and with a mask that has no gradient; inference and long sequences keep the kernel, which
    wins there. Exactness: forward bit-exact; gradients rounding-equal, with the kernel's fp32 scores and
    probabilities, summed in another order.
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
            if not _trains(node):
                continue
            given = facts.schema_arguments(SDPA, node.args, dict(node.kwargs))
            reason = _why_not(given)
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            node.op, node.target = "call_function", attention_low
            node.args, node.kwargs = tuple(given[name] for name in NAMES[:3]), _others(given)
            changes.append(Change(self.name, "explicit backward", node.name, "the CPU kernel's is slower in bf16"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _hides_attention(node: Node) -> bool:
    """Say whether ``node`` is attention with its projections in one call, and trains without dropout."""
    identity = node.meta.get(OPS)
    if not isinstance(identity, Identity) or len(identity.operations) < 2 or REGION in node.meta:
        return False
    inside = [o for o in identity.operations if o.op is SDPA]
    return bool(inside) and all(o.arguments["dropout_p"] == 0 for o in inside) and is_trained(node)


def _trains(node: Node) -> bool:
    if node.op != "call_function" or node.target is attention_low or REGION in node.meta:
        return False
    return names_of(node) == ("aten.scaled_dot_product_attention",) and is_trained(node)


def _why_not(given: dict[str, Any]) -> str:
    """Return why a call stays as it is, "" where it does not."""
    if given["dropout_p"] != 0:
        return "its dropout draws random numbers inside of the kernel"
    query, key, mask = given["query"], given["key"], given["attn_mask"]
    if isinstance(mask, Node) and is_trained(mask):
        return "its mask is trained"
    q, k = value(query), value(key)
    sizes = concrete_size(q.shape[-2]), concrete_size(k.shape[-2])
    if q.dim() != 4 or not explicit_backward_pays(q.device.type, q.dtype, *sizes):
        return f"the kernel is as fast for {sizes[0]} x {sizes[1]} tokens in {q.dtype} on {q.device.type}"
    return ""


def _others(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that are not the defaults."""
    defaults = facts.schema_arguments(SDPA, (None,) * 3, {})
    return {name: given[name] for name in NAMES[3:] if given[name] is not None and given[name] != defaults[name]}
