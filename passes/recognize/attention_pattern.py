"""Match attention that is written out in Python, starting from its softmax.

Before: a softmax. After: ``Found(formula, scores, values, merged)``. Heads may have their own dimension, or be folded
into the batch, as for ``bmm`` and ``baddbmm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.call_arguments import given_to
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import arguments_of, names_of, operations_of
from amp_graph.passes.graph.match import (
    Formula,
    constant_beside,
    converts_nothing,
    is_closed,
    is_written_meanwhile,
    one_reader,
    operation,
)
from amp_graph.passes.graph.meta_keys import CHECKPOINT, IDENTITY, REGION, TRANSFORM
from amp_graph.passes.torch_compat.fake import is_contiguous

PRODUCTS = ("aten.matmul", "aten.bmm")
STEPS = 10  # the most operations between a matmul and its softmax
RESHAPES = (("aten.view",), ("aten.reshape",), ("aten.flatten",), ("aten.unflatten",), ("aten._unsafe_view",))


@dataclass(frozen=True)
class Term:
    """A mask that is added to the scores, times ``factor``, or a boolean one of the positions that are hidden.

    ``folded``: the heads are folded into the batch.
    """

    node: Node
    folded: bool
    factor: float = 1.0


@dataclass(frozen=True)
class Scores:
    """The input of the softmax: queries times transposed keys (``turned``), times ``scale``, plus ``terms``.

    ``hidden``: a mask of the positions to hide, which are -inf. ``split``: the node that gives the heads their own
    dimension again, if they were folded into the batch for the matmul. ``folded``: they are folded again behind it.
    """

    query: Node
    turned: Node
    scale: float
    terms: tuple[Term, ...]
    inside: frozenset[Node]
    hidden: Term | None = None
    split: Node | None = None
    folded: bool = False

    @property
    def masks(self) -> list[Term]:
        """All masks that the scores read."""
        return [*self.terms, *([] if self.hidden is None else [self.hidden])]


@dataclass(frozen=True)
class Found:
    """A matched attention; ``merged``: the heads of its result are folded into the batch.

    ``dropped``: the dropout probability of the attention probabilities.
    """

    formula: Formula
    scores: Scores
    values: Node
    merged: bool
    dropped: float


def attention_around(softmax: Node) -> Found | None:
    """Return the attention around ``softmax``, or None if there is none."""
    source = softmax.args[0] if softmax.args else None
    scores = _scores(source) if isinstance(source, Node) and _is_over_the_last(softmax, source) else None
    if scores is None:
        return None
    chances, inside, dropout = softmax, {softmax, *scores.inside}, None
    while (reader := one_reader(chances)) is not None:
        if dropout is None and _dropped_by(reader):
            dropout = reader
        elif not (converts_nothing(reader) or (scores.split is not None and _folds(reader))):
            break
        inside.add(reader)
        chances = reader
    if reader is None or operation(reader)[0] not in PRODUCTS or operation(reader)[1][0] is not chances:
        return None
    values, last = operation(reader)[1][1], reader
    if not isinstance(values, Node) or values in inside or not _fits(scores, values):
        return None
    merged = captured(reader).dim() == 3
    if merged and scores.split is not None and (behind := one_reader(reader)) is not None and _splits(behind, scores):
        last, merged = behind, False
    formula = Formula(scores.query, last, {*inside, reader, last})
    others = (scores.turned, values, *(term.node for term in scores.masks))
    if not is_closed(formula) or any(is_written_meanwhile(formula, node, scores.inside) for node in others):
        return None
    if dropout is not None and _is_any_drawn(dropout, last):
        return None
    return Found(formula, scores, values, merged, 0.0 if dropout is None else _dropped_by(dropout))


def _is_over_the_last(softmax: Node, source: Node) -> bool:
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    return dim in (-1, value(softmax).dim() - 1) and value(softmax).dtype == value(source).dtype


def _dropped_by(node: Node) -> float:
    """Return the probability of a training dropout that draws in memory order, as attention does; else 0."""
    given = given_to(node)
    if given is None or not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return 0.0
    p = given["p"]
    plain = isinstance(p, float) and p < 1 and given["train"] is True
    return p if plain and is_contiguous(captured(node)) else 0.0


def _is_any_drawn(dropout: Node, last: Node) -> bool:
    """Say whether a node between the two draws random numbers: moving ``dropout`` after it would change the draws."""
    node = dropout.next
    while node is not last:
        if IDENTITY not in node.meta or any(node_info.draws(o.op, o.arguments) for o in operations_of(node)):
            return True
        node = node.next
    return False


def _folds(node: Node) -> bool:
    """Say whether ``node`` reshapes [batch, heads, ...] to [batch * heads, ...]."""
    source = node.args[0] if names_of(node) in RESHAPES else None
    return isinstance(source, Node) and _is_split(captured(source), captured(node))


def _unfolds(node: Node) -> bool:
    """Say whether ``node`` reshapes [batch * heads, ...] to [batch, heads, ...], with a known number of heads."""
    if names_of(node) not in RESHAPES or not isinstance(node.args[0], Node):
        return False
    made = captured(node)
    return _is_split(made, captured(node.args[0])) and type(made.shape[1]) is int


def _is_split(split: torch.Tensor, folded: torch.Tensor) -> bool:
    return split.dim() == 4 and folded.dim() == 3 and told(split.shape[2:]) == told(folded.shape[1:])


def _splits(node: Node, scores: Scores) -> bool:
    """Say whether ``node`` splits attention's result as ``scores.split`` splits the scores."""
    return _unfolds(node) and told(captured(node).shape[:2]) == told(captured(scores.split).shape[:2])  # type: ignore[arg-type]


def _step(node: Node) -> tuple[str, list[Any]]:
    """Return ``operation(node)``; an in-place one counts as out of place if its target has no other reader."""
    name, args = operation(node)
    alone = name.endswith("_") and isinstance(args[0], Node) and set(args[0].users) == {node}
    return (name[:-1] if alone else name), args


def _scores(node: Node, steps: int = STEPS) -> Scores | None:
    """Match ``node`` backwards to the matmul of queries and keys, by at most so many ``steps``."""
    if (product := _product(node)) is not None:
        query, turned, bias, beta, alpha = product
        terms = () if bias is None else (Term(bias, captured(node).dim() == 3, beta),)
        return Scores(query, turned, alpha, terms, frozenset({node}))
    for source, behind in _readings(node) if steps else ():
        before = _scores(source, steps - 1)
        found = None if before is None else behind(before)
        if found is not None:
            return replace(found, inside=found.inside | {node})
    return None


def _readings(node: Node) -> Iterator[tuple[Any, Callable[[Scores], Scores | None]]]:
    """Yield what of ``node`` may be scores, and what they are behind it; None where they are none."""
    name, args = _step(node)
    in_batch = captured(node).dim() == 3
    if _unfolds(node):
        yield node.args[0], lambda s: None if s.split or s.folded else replace(s, split=node)
    elif _folds(node):  # before the softmax
        yield node.args[0], lambda s: None if s.folded or s.split is None else replace(s, folded=True)
    elif name in ("aten.mul", "aten.div") and (scaled := _scaled(node)) is not None:
        yield scaled[0], partial(_times, factor=scaled[1])
    elif name == "aten.add" and len(args) == 2 and all(isinstance(a, Node) for a in args):
        # In place, what is written to are the scores.
        for source, mask in (args, args[::-1])[: 1 if operation(node)[0] != name else 2]:
            if captured(source).dim() in (3, 4):
                term = Term(mask, in_batch)
                yield source, lambda s, term=term: replace(s, terms=(term, *s.terms))  # type: ignore[misc]
    elif name == "aten.masked_fill" and len(args) == 3 and isinstance(args[1], Node) and args[2] == -math.inf:
        yield args[0], lambda s: None if s.hidden else replace(s, hidden=Term(args[1], in_batch))
    elif converts_nothing(node):
        yield node.args[0], lambda s: s


def _times(scores: Scores, factor: float) -> Scores | None:
    """Return scores times ``factor``, with which hidden positions must stay hidden."""
    if scores.hidden is not None and factor <= 0:
        return None
    terms = tuple(replace(term, factor=term.factor * factor) for term in scores.terms)
    return replace(scores, scale=scores.scale * factor, terms=terms)


def _product(node: Node) -> tuple[Node, Node, Node | None, float, float] | None:
    """Return the two factors of a matmul ``node``, its addend, and the scales of the addend and of the matmul."""
    name, args = operation(node)
    if name in PRODUCTS and all(isinstance(a, Node) for a in args):
        return args[0], args[1], None, 0.0, 1.0
    given = arguments_of(node) if names_of(node) == ("aten.baddbmm",) and "out" not in node.kwargs else None
    if given is None or not given["beta"] or not given["alpha"]:
        return None
    return given["batch1"], given["batch2"], given["self"], float(given["beta"]), float(given["alpha"])


def _scaled(node: Node) -> tuple[Node, float] | None:
    """Return the node that ``node`` multiplies by a number, and that number."""
    source = next((a for a in operation(node)[1] if isinstance(a, Node)), None)
    factor = constant_beside(node, source) if source is not None else None
    return None if source is None or factor is None else (source, factor)


def _fits(scores: Scores, values: Node) -> bool:
    """Say whether torch's attention function accepts these operands, after unfolding heads from the batch."""
    query, turned, v = (captured(n) for n in (scores.query, scores.turned, values))
    dims = 3 if scores.split is not None else query.dim()
    if dims not in (3, 4) or any(t.dim() != dims for t in (query, turned, v)):
        return False
    if not query.dtype == turned.dtype == v.dtype == torch.float32:
        return False
    sizes = [told(t.shape) for t in (query, turned.mT, v)]
    if sizes[1] != sizes[2] or sizes[0][:-2] != sizes[2][:-2] or sizes[0][-1] != sizes[2][-1]:
        return False
    masks = [(captured(term.node), term) for term in scores.masks]
    if any(is_trained(term.node) or not 2 <= mask.dim() <= (3 if term.folded else 4) for mask, term in masks):
        return False
    return all(captured(term.node).dtype == query.dtype for term in scores.terms)


def told(sizes: Iterable[Any]) -> list[str]:
    """Return sizes as text, which can be compared without a guard on symbolic ones."""
    return [str(size) for size in sizes]
