"""Recognize attention that was written out in Python, and call the one that torch has.

Before: ``((q @ k.mT) * scale + mask).softmax(-1) @ v``, which under autocast rounds the scores, keeps the probabilities
of all heads for backward, and differentiates each step. After: ``scaled_dot_product_attention(q, k, v, mask,
scale=scale)``, which the pass ``attention`` then computes by code of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass, OpList
from amp_graph.passes import facts
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.formulas import (
    Formula,
    constant_beside,
    converts_nothing,
    describe,
    is_closed,
    is_written_meanwhile,
    operation,
    put_call,
)
from amp_graph.passes.identify_ops import OPS, Identity, names_of
from amp_graph.passes.node_value import captured, fake_mode_of, value
from amp_graph.passes.regions import is_trained
from amp_graph.passes.torch_private import FakeTensorMode
from amp_graph.passes.what_pays import attention_call_pays

PRODUCTS = ("aten.matmul", "aten.bmm")
ALLOWED = (
    torch.ops.aten.matmul.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.scaled_dot_product_attention.default,
)
SOFTMAX = (("aten.softmax",), ("aten._softmax",), ("aten.special_softmax",))


@dataclass
class Scores:
    """What a softmax is taken of: products of queries and turned keys, times ``scale``, plus ``mask``.

    ``hidden``: a mask that is true where nothing is to be seen.
    """

    query: Node
    turned: Node
    scale: float = 1.0
    mask: Node | None = None
    hidden: Node | None = None
    inside: set[Node] = field(default_factory=set)


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Replaces attention's formula by ``torch.nn.functional.scaled_dot_product_attention`` when ``what_pays`` says so.

    Law: of four dimensions, heads alike on both sides; scores scaled by a number, with one mask that has no gradient,
    added, or of ``masked_fill(-inf)``; no dropout; read by nobody half-way, as by who returns the probabilities.
    The lists allow both products and the call. Exactness: rounding-different; scores stay fp32, where the formula
    rounds them. A row whose scores are all -inf gives zeros, where the formula gives NaN.
    """

    lists: OpList
    dtype: torch.dtype
    device: str
    keep_fp32: str = ""
    name: ClassVar[str] = "fuse-attention"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every softmax."""
        mode = fake_mode_of(gm)
        changes = []
        for node in list(gm.graph.nodes) if self._is_wanted() else ():
            found = _found(node) if names_of(node) in SOFTMAX else None
            if found is None or mode is None or not self._is_free(found[0].inside):
                continue
            formula, scores, values = found
            keys, mask = _turned_back(gm, scores.turned, mode), scores.mask
            if scores.hidden is not None:
                mask = _put(gm, formula.last, torch.logical_not, (scores.hidden,), mode)
            given = {} if mask is None else {"attn_mask": mask}
            made = put_call(
                gm,
                formula,
                F.scaled_dot_product_attention,
                (scores.query, keys, values),
                mode,
                **given,
                scale=scores.scale,
            )
            if not scores.turned.users:
                gm.graph.erase_node(scores.turned)
            what = f"{len(formula.inside)} operations that are attention, scale={scores.scale:g}"
            changes.append(Change(self.name, "fused", made.name, what))
        return PassResult(gm, tuple(changes))

    def _is_wanted(self) -> bool:
        rules = [self.lists.lookup(op, {}) for op in ALLOWED]
        allowed = all(rule is not None and rule.cls is OpClass.ALLOW for rule in rules)
        return allowed and attention_call_pays(self.device, self.dtype)

    def _is_free(self, inside: set[Node]) -> bool:
        """Say whether nobody asks for a precision of a part of the formula: a region, or the name of a module."""
        if any("amp_wish" in node.meta for node in inside):
            return False
        rules = [re.compile(path) for path in (self.keep_fp32, *(m.path for m in self.lists.modules)) if path]
        paths = {facts.module_path(node) for node in inside}
        return all(len({bool(facts.matches_path(rule, path)) for path in paths}) == 1 for rule in rules)


def _found(softmax: Node) -> tuple[Formula, Scores, Node] | None:
    """Return the attention around ``softmax``, of what its scores are, and its values; None for anything else."""
    source = softmax.args[0] if softmax.args else None
    scores = _scores(source) if isinstance(source, Node) and _is_over_the_last(softmax, source) else None
    if scores is None:
        return None
    chances, inside = softmax, {softmax, *scores.inside}
    while (reader := _one_reader(chances)) is not None and (converts_nothing(reader) or _drops_nothing(reader)):
        inside.add(reader)
        chances = reader
    if reader is None or operation(reader)[0] not in PRODUCTS or operation(reader)[1][0] is not chances:
        return None
    values = operation(reader)[1][1]
    formula = Formula(scores.query, reader, {*inside, reader})
    if not isinstance(values, Node) or values in inside or not _fits(scores, values) or not is_closed(formula):
        return None
    others = [n for n in (scores.turned, values, scores.mask, scores.hidden) if n is not None]
    return None if any(is_written_meanwhile(formula, n) for n in others) else (formula, scores, values)


def _one_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_over_the_last(softmax: Node, source: Node) -> bool:
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    return dim in (-1, value(softmax).dim() - 1) and value(softmax).dtype == value(source).dtype


def _drops_nothing(node: Node) -> bool:
    """Say whether ``node`` is dropout in evaluation, or of probability 0."""
    identity = node.meta.get(OPS)
    if names_of(node) != ("aten.dropout",) or not isinstance(identity, Identity):
        return False
    return not any(facts.draws(o.op, o.arguments) for o in identity.operations)


def _scores(node: Node) -> Scores | None:
    """Read ``node`` back to the product of queries and keys."""
    scale, mask, hidden, inside = 1.0, None, None, set[Node]()
    while True:
        inside.add(node)
        name, args = operation(node)
        if name in PRODUCTS and all(isinstance(a, Node) for a in args):
            query, turned = args
            return Scores(query, turned, scale, mask, hidden, inside)
        if name in ("aten.mul", "aten.div") and (before := _scaled(node)) is not None:
            node, factor = before
            scale *= factor
            continue
        if mask is not None or hidden is not None or scale != 1:
            return None  # what is masked is scaled already
        if name == "aten.add" and (parts := _masked(args)) is not None:
            node, mask = parts
        elif name == "aten.masked_fill" and len(args) == 3 and args[2] == -math.inf:
            node, hidden = args[0], args[1]
        elif converts_nothing(node):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return None


def _scaled(node: Node) -> tuple[Node, float] | None:
    """Return what ``node`` multiplies with a number, and that number."""
    source = next((a for a in operation(node)[1] if isinstance(a, Node)), None)
    factor = constant_beside(node, source) if source is not None else None
    return None if source is None or factor is None else (source, factor)


def _masked(args: list[Any]) -> tuple[Node, Node] | None:
    """Return of two summands the one that is made of products, and the other."""
    if len(args) != 2 or not all(isinstance(a, Node) for a in args):
        return None
    for scores, mask in (args, args[::-1]):
        node, steps = scores, 0
        while operation(node)[0] in ("aten.mul", "aten.div") and (before := _scaled(node)) is not None and steps < 4:
            node, steps = before[0], steps + 1
        if operation(node)[0] in PRODUCTS and captured(scores).dim() == 4:
            return scores, mask
    return None


def _fits(scores: Scores, values: Node) -> bool:
    """Say whether torch's function takes these operands as they are."""
    query, turned, v = (captured(n) for n in (scores.query, scores.turned, values))
    if any(t.dim() != 4 for t in (query, turned, v)) or not query.dtype == turned.dtype == v.dtype == torch.float32:
        return False
    sizes = [_told(t.shape) for t in (query, turned.mT, v)]
    if sizes[1] != sizes[2] or sizes[0][:2] != sizes[2][:2] or sizes[0][3] != sizes[2][3]:
        return False
    for mask in (scores.mask, scores.hidden):
        if mask is not None and (is_trained(mask) or captured(mask).dim() not in (2, 4)):
            return False
    return scores.mask is None or captured(scores.mask).dtype == query.dtype


def _told(sizes: Iterable[Any]) -> list[str]:
    """Return sizes to compare without a guard on symbolic ones."""
    return [str(size) for size in sizes]


def _turned_back(gm: GraphModule, turned: Node, mode: FakeTensorMode) -> Node:
    """Return what was turned to be the right operand of a product, or that, turned back."""
    source = turned.args[0] if turned.args else None
    swaps = names_of(turned) in (("aten.transpose",), ("aten.mT",), ("aten.permute",), ("aten.swapaxes",))
    if isinstance(source, Node) and swaps:
        a, b = captured(source), captured(turned).mT
        if _told((*a.shape, *a.stride())) == _told((*b.shape, *b.stride())):
            return source
    return _put(gm, turned.next, torch.transpose, (turned, -2, -1), mode)


def _put(gm: GraphModule, before: Node, function: Callable[..., Any], args: tuple[Any, ...], mode: Any) -> Node:
    """Put a call of ``function`` before a node, in the region of what it is given; return it."""
    with gm.graph.inserting_before(before):
        return describe(gm.graph.call_function(function, args), args[0], mode)
