"""Recognize attention that is written out in Python, and call torch's attention function instead.

Before: ``((q @ k.mT) * scale + mask).softmax(-1) @ v``, which under autocast rounds the scores, saves the probabilities
of all heads for backward, and differentiates each step. After: ``scaled_dot_product_attention(q, k, v, mask,
scale=scale)``, for which the pass ``attention`` then uses one of our kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass
from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.call_arguments import attention_kernel_is_profitable, transposes
from amp_graph.passes.graph.edit import describe, put_before, put_call
from amp_graph.passes.graph.fake_values import captured
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import WISH, WRITTEN_OUT
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.native.kernel_table import is_available
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.recognize.attention_pattern import RESHAPES, Found, attention_around, told
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size

ALLOWED = (
    torch.ops.aten.matmul.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.scaled_dot_product_attention.default,
)
Put = Callable[..., Node]  # ``put_before`` of a graph
SOFTMAX = (("aten.softmax",), ("aten._softmax",), ("aten.special_softmax",))


@dataclass(frozen=True)
class FuseAttention(NodePass):
    """Replaces attention's formula by ``torch.nn.functional.scaled_dot_product_attention`` where it is profitable.

    Law: four dimensions, or three with heads folded into the batch; as many key heads as query heads; scores scaled by
    numbers; masks without gradients, added (also by ``baddbmm``) or as ``masked_fill`` with -inf, in place as well;
    dropout if our kernel draws it, with the same draws; no other reader inside the formula, such as one that returns
    the probabilities. The lists allow both matmuls and the call. What is added stays
    fp32, as only our kernel takes it: a bias of 300 would be rounded by 1, and the least number to -inf.
    Exactness: rounding-different; scores stay fp32, where the formula rounds them. A row of scores that are all -inf
    gives zeros, where the formula gives NaN.
    """

    options: PipelineOptions

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Fuse what is around a softmax."""
        found = attention_around(node) if names_of(node) in SOFTMAX and self._is_wanted() else None
        if found is None or not self._is_free(found.formula.inside):
            return None
        has_kernel = attention_kernel_is_profitable(self.options.planned_for, self.options.dtype)
        if found.dropped and not (has_kernel and is_available("attention", self.options.dtype)):
            return None
        if found.scores.terms and not has_kernel:
            return Skip(node.name, "the kernel would round the mask that is added to the scores")
        made = _call(gm, found, mode)
        what = f"{len(found.formula.inside)} operations are one attention call, scale={found.scores.scale:g}"
        return Change(self.name, "fused", made.name, what)

    def _is_wanted(self) -> bool:
        rules = [self.options.lists.lookup(op, {}) for op in ALLOWED]
        allowed = all(rule is not None and rule.cls is OpClass.ALLOW for rule in rules)
        return allowed and attention_call_is_profitable(self.options.planned_for, self.options.dtype)

    def _is_free(self, inside: set[Node]) -> bool:
        """Say whether no region and no module rule sets the precision of a part of the formula."""
        if any(WISH in node.meta for node in inside):
            return False
        rules = [path for path in (self.options.keep_fp32, *(m.path for m in self.options.lists.modules)) if path]
        paths = {node_info.module_path(node) for node in inside}
        return all(len({bool(node_info.matches_path(rule, path)) for path in paths}) == 1 for rule in rules)


def _call(gm: GraphModule, found: Found, mode: FakeTensorMode) -> Node:
    """Replace ``found`` by a call with four-dimensional operands, which is returned; erase nodes without readers."""
    formula, scores, put = found.formula, found.scores, partial(put_before, gm, mode=mode)
    keys = _untransposed(scores.turned, put)
    read = [_four_dimensional(n, found, put) for n in (scores.query, keys, found.values)]
    mask = _mask(found, put)
    given: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
    given |= {"dropout_p": found.dropped} if found.dropped else {}
    given["scale"] = scores.scale
    if not found.merged:
        made = put_call(gm, formula, F.scaled_dot_product_attention, read, mode, **given)
    else:
        with gm.graph.inserting_before(formula.last):
            made = gm.graph.call_function(F.scaled_dot_product_attention, tuple(read), given)
        describe(made, formula.last, mode)
        put_call(gm, formula, torch.flatten, (made, 0, 1), mode)
    made.meta[WRITTEN_OUT] = True
    for node in (scores.turned, keys, scores.query, found.values):
        if node not in read and not node.users and node.op != "placeholder":
            gm.graph.erase_node(node)
    return made


def _untransposed(turned: Node, put: Put) -> Node:
    """Return the untransposed keys: the source of the transpose, or a transpose of the operand."""
    source = turned.args[0] if turned.args else None
    if isinstance(source, Node) and transposes(turned):
        a, b = captured(source), captured(turned).mT
        if told((*a.shape, *a.stride())) == told((*b.shape, *b.stride())):
            return source
    return put(turned.next, torch.transpose, turned, -2, -1)


def _four_dimensional(node: Node, found: Found, put: Put, *, folded: bool = True) -> Node:
    """Return a view of ``node`` as [batch, heads, ...]; ``folded``: ``node`` is [batch * heads, ...]."""
    split, whole = found.scores.split, captured(node)
    if whole.dim() != 3:
        return node
    if not folded or split is None or concrete_size(whole.shape[0]) == 1:
        return put(found.formula.last, torch.unsqueeze, node, 0)
    source, heads = node.args[0] if node.args else None, captured(split).shape[:2]
    if names_of(node) in RESHAPES and isinstance(source, Node):
        if told(captured(source).shape) == told((*heads, *whole.shape[1:])):
            return source  # the tensor before its heads were folded into the batch
    return put(found.formula.last, torch.unflatten, node, 0, (-1, heads[1]))


def _mask(found: Found, put: Put) -> Node | None:
    """Return the mask of the call, additive or boolean; None if there is none."""
    hidden, terms, last = found.scores.hidden, found.scores.terms, found.formula.last
    masks = [_four_dimensional(term.node, found, put, folded=term.folded) for term in terms]
    blocked = None if hidden is None else _four_dimensional(hidden.node, found, put, folded=hidden.folded)
    if not masks:
        return None if blocked is None else put(last, torch.logical_not, blocked, like=last)
    scaled = [
        mask if term.factor == 1 else put(last, torch.mul, mask, term.factor, like=last)
        for mask, term in zip(masks, terms, strict=True)
    ]
    made = reduce(lambda one, other: put(last, torch.add, one, other, like=last), scaled)
    return made if blocked is None else put(last, torch.masked_fill, made, blocked, -math.inf, like=last)


def attention_call_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether one attention call beats its formula, which materializes all scores and saves the probabilities.

    CPU: if one of our kernels runs it. CUDA, low precision: by flash or memory-efficient attention.
    """
    return attention_kernel_is_profitable(device, dtype) or (device == "cuda" and dtype in HALVES)
