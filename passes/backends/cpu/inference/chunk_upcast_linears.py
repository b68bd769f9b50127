"""Compute large matmul results in chunks, each upcast while it is in cache, in graphs without gradients.

Before: ``y = widen_again(linear_of_packed(x, packed_weight(w), b), 0)``.
After: ``y = linear_widened(x, packed_parts(w, 2048), b, 0)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.inference.chunked_linear import parts_reader, widened_product
from amp_graph.passes.backends.cpu.inference.prepacked_linear import linear_of_packed
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import TURNED
from amp_graph.passes.profitability.gemm_thresholds import outputs_at_once
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.weights.cast_cache import WeightCopies


@dataclass(frozen=True)
class ChunkUpcastLinears(Pass):
    """Replaces a large result in reused memory, of a matmul that it alone reads, with ``linear_widened``.

    Law: a packed weight that nothing else reads, no activation between. Exactness: rounding-equal, as by packing: the
    same rounding to low precision, of sums in another order.
    """

    copies: WeightCopies
    name: ClassVar[str] = "chunk-upcast-linears"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every result that is upcast into reused memory."""
        parts, product, changes = parts_reader(self.copies), widened_product(self.copies.results), []
        for node in gm.graph.find_nodes(op="call_function", target=self.copies.results.widen_again):
            linear, place = node.args
            weight = _weight_of(linear)
            if weight is None:
                continue
            outputs = value(weight).shape[0]
            at_once = outputs_at_once(concrete_size(value(linear).numel()) // outputs, outputs)
            weight.target, weight.args = parts, (*weight.args, at_once)
            node.target, node.args = product, (*linear.args[:3], place)
            gm.graph.erase_node(linear)
            changes.append(Change(self.name, "in parts", node.name, f"{at_once} of {outputs} outputs at once"))
        return PassResult(gm, tuple(changes))


def _weight_of(linear: Any) -> Node | None:
    """Return the packed weight of ``linear``, if each of the two has one reader."""
    if not isinstance(linear, Node) or linear.target is not linear_of_packed or len(linear.users) != 1:
        return None
    if len(linear.args) != 3 or linear.kwargs:  # an activation is fused
        return None
    weight = linear.args[1]
    if not isinstance(weight, Node) or len(weight.users) != 1:
        return None
    return weight if weight.meta.get(TURNED) is False else None
