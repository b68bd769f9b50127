"""Accumulate the contributions to a gradient in place, in the memory of one of them, instead of in a new tensor.

Before: ``add(dx, view(mm(g, w)))``.
After: ``view(addmm_(view(dx), g, w))``: the matmul adds to ``dx`` in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult, Writes
from amp_graph.passes.graph.edit import insert_call
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.profitability.thresholds import (
    accumulating_is_profitable,
    scattering_is_profitable,
    widening_first_is_profitable,
)
from amp_graph.passes.torch_compat.fake import FakeTensorMode, numel
from amp_graph.passes.torch_compat.symbolic_sizes import alike, is_contiguous, same

ATEN: Any = torch.ops.aten
SUMS = (ATEN.add.Tensor, ATEN.add_.Tensor)
VIEWS = (ATEN.view.default, ATEN._unsafe_view.default)


@dataclass(frozen=True)
class AccumulateInPlace(Pass):
    """Replaces sums of a flat step graph with sums in place, when nothing else reads one of the summands any more.

    The first of these rules that applies:

    * product: ``add(x, mm(a, b))`` with ``addmm_(x, a, b)``, through views; ``addmm`` if ``x`` is read again.
      *Approximate, one rounding less*: the matmul's result is not rounded before the addition.
    * scatter: ``add(x, embedding_dense_backward(g, ids))`` with ``index_add_(x, ids, g)``, without a table of zeros.
      *Rounding-equal*: fp32, in another order.
    * widened: ``add(x, low)`` of two precisions with ``add_(low.float(), x)``. *Bit-exact*.
    * in place: ``add(x, y)`` with ``add_(x, y)``. *Bit-exact*.

    Only for graphs that run as they are: a compiler plans memory itself.
    """

    name: ClassVar[str] = "accumulate-in-place"
    writes: ClassVar[Writes] = Writes.OWN

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every sum once, in order."""
        mode = fake_mode_of(gm)
        if mode is None:
            return PassResult(gm)
        work = _Sums(gm, mode, Lifetimes.of(gm))
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.target in SUMS and _is_plain(node):
                work.visit(node)
        return PassResult(gm, tuple(work.changes))


@dataclass
class _Sums:
    gm: GraphModule
    mode: FakeTensorMode
    lives: Lifetimes
    changes: list[Change] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        """Apply the first of the rules that fits."""
        x, y = node.all_input_nodes
        if node.target is ATEN.add_.Tensor:
            self._widen(node, x, y)
            return
        rules = (self._product, self._scatter, self._widen, self._in_place)
        any(rule(node, *given) for rule in rules for given in ((x, y), (y, x)))

    def _product(self, node: Node, x: Node, y: Node) -> bool:
        """``add(x, views(mm(a, b)))`` -> ``views(addmm(x, a, b))``, run where ``mm`` did."""
        path = _path_to_product(y)
        if not path or not _alike(x, node) or not _alike(y, node) or not is_contiguous(value(y)):
            return False
        mm, lives = path[0], self.lives
        if lives.order[x] > lives.order[mm] or lives.is_written_between(x, mm, node):
            return False
        val, in_place = value(mm), lives.is_done_after(x, mm, node)
        if not accumulating_is_profitable(val.device.type, val.dtype, in_place):
            return False
        into = self._seen_as(mm, x)
        mm.target, mm.args = (ATEN.addmm_ if in_place else ATEN.addmm).default, (into, *mm.args)
        if in_place:
            lives.join(mm, x, lives.order[mm])
        lives.join(node, mm, lives.order[mm])
        node.replace_all_uses_with(y)
        self.gm.graph.erase_node(node)
        self._say("in the product", mm, f"{type_text(val)}: the matmul accumulates into it and rounds once")
        return True

    def _seen_as(self, mm: Node, x: Node) -> Node:
        """Return ``x``, which is contiguous like ``mm``, viewed in the shape of ``mm``."""
        shape = list(value(mm).shape)
        if same(value(x).shape, shape):
            return x
        made = insert_call(mm, self.mode, ATEN.view.default, x, shape)
        self.lives.order[made], self.lives.roots[made] = self.lives.order[mm], self.lives.roots[x]
        return made

    def _scatter(self, node: Node, x: Node, y: Node) -> bool:
        """``add(x, embedding_dense_backward(g, ids))`` -> ``index_add_(x, 0, ids, g)``."""
        if y.target is not ATEN.embedding_dense_backward.default or len(y.users) > 1 or not _alike(x, node):
            return False
        given: Any = y.args
        (grad, ids, rows, padding, by_frequency), lives, val = given, self.lives, value(y)
        if by_frequency or val.dtype != torch.float32 or not lives.is_done_after(x, node, node):
            return False
        if not scattering_is_profitable(val.device.type, numel(value(ids)), rows):
            return False
        if any(lives.is_written_between(n, y, node) for n in (grad, ids)):
            return False
        flat = self._made(node, ATEN.reshape.default, ids, [-1])
        given = self._made(node, ATEN.reshape.default, grad, [-1, val.shape[-1]])
        if padding >= 0:
            mask = self._made(node, ATEN.unsqueeze.default, self._made(node, ATEN.eq.Scalar, flat, padding), 1)
            given = self._made(node, ATEN.masked_fill.Scalar, given, mask, 0)
        node.target, node.args = ATEN.index_add_.default, (x, 0, flat, given)
        lives.join(node, x, lives.order[node])
        self.gm.graph.erase_node(y)
        self._say("by row", node, f"{type_text(val)}: rows are added to it, without a table of zeros")
        return True

    def _widen(self, node: Node, x: Node, y: Node) -> bool:
        """``add(x, low)`` -> ``add_(low.float(), x)``; ``add_(x, low)`` -> ``add_(x, low.float())``."""
        val, low = value(node), value(y)
        fits = _alike(x, node) and same(low.shape, val.shape)
        if not fits or low.dtype == val.dtype or not low.is_floating_point():
            return False
        if not widening_first_is_profitable(val.device.type, numel(val)):
            return False
        wide = self._made(node, ATEN._to_copy.default, y, dtype=val.dtype)
        if node.target is ATEN.add_.Tensor:
            node.args = (x, wide)
        elif _alike(wide, node):
            node.target, node.args = ATEN.add_.Tensor, (wide, x)
            self.lives.join(node, wide, self.lives.order[node])
        else:
            self.gm.graph.erase_node(wide)
            return False
        self._say("widened", node, f"{type_text(val)}: mixed precisions, for which torch's add makes copies")
        return True

    def _in_place(self, node: Node, x: Node, y: Node) -> bool:
        """``add(x, y)`` -> ``add_(x, y)``."""
        if not _alike(x, node) or value(y).dtype != value(x).dtype or not self.lives.is_done_after(x, node, node):
            return False
        if self.lives.memory(x) & self.lives.memory(y):
            return False
        node.target, node.args = ATEN.add_.Tensor, (x, y)
        self.lives.join(node, x, self.lives.order[node])
        self._say("in place", node, f"{type_text(value(node))}: nothing else reads {x.name} any more")
        return True

    def _made(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = insert_call(before, self.mode, target, *args, **kwargs)
        self.lives.add(made, before)
        return made

    def _say(self, action: str, node: Node, reason: str) -> None:
        self.changes.append(Change(AccumulateInPlace.name, action, node.name, reason))


def _is_plain(node: Node) -> bool:
    """Say whether ``node`` is a sum of two tensors on one device, none of them scaled."""
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args):
        return False
    vals = [value(a) for a in node.all_input_nodes]
    return len(vals) == 2 and len({v.device for v in vals}) == 1


def _path_to_product(y: Node) -> list[Node]:
    """Return ``mm`` and the views from it to ``y``, each with one reader; [] if ``y`` is something else."""
    path = [y]
    while path[0].target in VIEWS and len(path[0].users) == 1:
        path.insert(0, path[0].all_input_nodes[0])
    found = path[0].target is ATEN.mm.default and len(path[0].users) == 1
    return path if found else []


def _alike(x: Node, node: Node) -> bool:
    """Say whether ``x`` has the shape, the dtype and the layout of the sum ``node``."""
    return alike(value(x), value(node))
