"""Let products without gradients read weights that are packed for the kernel.

Before: ``w = weight_copy(weight); y = linear(x, w, b)``. After: ``w = packed_weight(weight);
y = linear_of_packed(x, w, b)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.identify_ops import OPS, names_of
from amp_graph.passes.node_value import CAPTURED, value
from amp_graph.passes.packed_weights import linear_of_packed, packed_reader
from amp_graph.passes.regions import REGION, may_record_gradients
from amp_graph.passes.weight_copies import WeightCopies
from amp_graph.passes.what_pays import packing_pays


@dataclass(frozen=True)
class Product:
    """A linear in the graph: of what, by which weight, plus which bias; whether the weight is [inputs, outputs]."""

    x: Any
    weight: Any
    bias: Any
    transposed: bool


@dataclass(frozen=True)
class PackWeights(Pass):
    """Replaces products with ``weight_copy(w)`` by such with ``packed_weight(w)`` where no gradient is recorded.

    Law: the same product by the same library, which is spared laying out the weight at each call. Each first call
    after an update reads a plain copy. Exactness: rounding-equal, sums in another order.
    """

    copies: WeightCopies
    name: ClassVar[str] = "pack-weights"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every kept copy of a weight that nothing but products read."""
        if may_record_gradients(gm):
            return PassResult(gm)
        readers = {transposed: packed_reader(self.copies, transposed) for transposed in (False, True)}
        changes = []
        for node in gm.graph.nodes:
            if node.target is not self.copies.read:
                continue
            found = {user: _product(user, node) for user in node.users}
            form = next(iter(found.values()), None)
            if form is None or not all(p is not None and p.transposed == form.transposed for p in found.values()):
                continue
            _pack(node, readers[form.transposed], form.transposed)
            for user, product in found.items():
                assert product is not None, "asked above"
                _rewrite(user, product)
            changes.append(Change(self.name, "packed", node.name, "for " + ", ".join(u.name for u in found)))
        return PassResult(gm, tuple(changes))


def _product(node: Node, weight: Node) -> Product | None:
    """Read ``node`` as a linear with ``weight`` that pays to be packed; None where it is none."""
    names, args = names_of(node), node.args
    if len(names) != 1 or REGION in node.meta or set(node.kwargs) - {"bias"}:
        return None
    if names[0] == "aten.linear" and len(args) in (2, 3):
        found = Product(args[0], args[1], args[2] if len(args) == 3 else node.kwargs.get("bias"), False)
    elif names[0] == "aten.addmm" and len(args) == 3:
        found = Product(args[1], args[2], args[0], True)
    elif names[0] in ("aten.mm", "aten.matmul") and len(args) == 2:
        found = Product(args[0], args[1], None, True)
    else:
        return None
    return found if found.weight is weight and _pays(node, found) else None


def _pays(node: Node, product: Product) -> bool:
    low, bias = value(product.weight), product.bias
    outputs, inputs = low.shape if low.dim() == 2 else (0, 0)
    outputs, inputs = (inputs, outputs) if product.transposed else (outputs, inputs)
    tensors = list(_values(node))
    if len(tensors) != len(node.all_input_nodes) or any(t.dtype != low.dtype for t in tensors):
        return False
    if product.x is product.weight or bias is product.weight:
        return False
    if bias is not None and tuple(value(bias).shape) != (outputs,):
        return False
    return packing_pays(low.device.type, low.dtype, outputs, inputs)


def _values(node: Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        if isinstance(value(source), torch.Tensor):
            yield value(source)


def _pack(weight: Node, reader: Any, transposed: bool) -> None:
    weight.target, weight.kwargs = reader, {}
    if transposed:
        weight.meta["val"] = weight.meta[CAPTURED] = value(weight).t()
        if "example_value" in weight.meta:
            weight.meta["example_value"] = value(weight)


def _rewrite(node: Node, product: Product) -> None:
    node.op, node.target, node.kwargs = "call_function", linear_of_packed, {}
    node.args = (product.x, product.weight, product.bias)
    node.meta.pop(OPS, None)
