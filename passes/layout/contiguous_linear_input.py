"""Make the input of a linear contiguous where torch would run a batched matmul, or add the bias separately.

Before: ``linear(h.transpose(0, 1), w, b)``. Without gradients this is one matmul per batch element, each with its own
copy of the weight. With gradients it is a matmul, a sum with the bias, and in backward a sum over two dimensions.
After: ``linear(h.transpose(0, 1).contiguous(), w, b)``: one matmul that adds the bias, and a sum over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass
from amp_graph.passes.graph.edit import describe
from amp_graph.passes.graph.fake_values import captured, fake_mode_of, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.graph.node_info import calls_torch
from amp_graph.passes.torch_compat.fake import concrete_size

PRODUCTS = (("aten.linear",), ("aten.matmul",))


@dataclass(frozen=True)
class ContiguousLinearInput(Pass):
    """Replaces ``linear(x, w)`` and ``x @ w`` by those of ``x.contiguous()`` when rows of ``x`` are not contiguous.

    Law: ``x`` has three dimensions or more, ``w`` two. Either ``w`` has no gradient (with one, torch folds ``x``
    itself: ``should_fold`` in aten/src/ATen/native/LinearAlgebra.cpp), or there is a bias, which torch would add
    separately (aten/src/ATen/native/Linear.cpp). On every device: the cost of the copy over that of the matmul is one
    over the width of ``w``. Exactness: rounding-equal, sums in another order; with a bias, one rounding less.
    """

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every linear; all linears that read a value share one copy of it."""
        mode = fake_mode_of(gm)
        copies: dict[Node, Node] = {}
        for node in list(gm.graph.nodes):
            if mode is None or not _is_slow_in_torch(node):
                continue
            source = node.args[0]
            assert isinstance(source, Node), "a linear reads a value"
            if source not in copies:
                with gm.graph.inserting_before(node):
                    copies[source] = copy = gm.graph.call_method("contiguous", (source,))
                describe(copy, node, mode)
            node.replace_input_with(source, copies[source])
            yield Change(self.name, "made contiguous", node.name, f"the rows of {source.name} are strided")


def _is_slow_in_torch(node: Node) -> bool:
    """Say whether ``node`` is a matmul that torch would run batch by batch, or without its bias."""
    if names_of(node) not in PRODUCTS or len(node.args) < 2 or REGION in node.meta or not calls_torch(node):
        return False
    x, w = node.args[:2]
    if not isinstance(x, Node) or not isinstance(w, Node) or not isinstance(value(x), torch.Tensor):
        return False
    if value(x).dim() < 3 or value(w).dim() != 2 or _has_contiguous_rows(value(x)):
        return False
    if len(node.args) > 2 and isinstance(node.args[2], Node):
        return True
    # Under no_grad the cast of a weight requires no gradient; the weight itself does even there.
    return not captured(w).requires_grad or (w.op not in ("placeholder", "get_attr") and not is_trained(node))


def _has_contiguous_rows(x: torch.Tensor) -> bool:
    """Say whether all dimensions but the last can be flattened to one; adds no guard on symbolic sizes."""
    sizes, strides = ([concrete_size(n) for n in given] for given in (x.shape, x.stride()))
    expected = 0
    for size, stride in reversed(list(zip(sizes[:-1], strides[:-1], strict=True))):
        if size == 1:
            continue
        if expected and stride != expected:
            return False
        expected = stride * size
    return True
