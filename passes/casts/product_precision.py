"""The precision that matrix products, convolutions and attention run in, against the one that was planned.

Before: a node marked "low", whose operator, taken apart, computes ``mm(f32, f32)``. After: a ``Lost`` record of it.
A plan that a pass does not keep gives right numbers slowly, or rounds what was to stay exact: nothing else shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.passes.graph.identify_ops import Operation, is_part, operations_of, tensor_inputs
from amp_graph.passes.graph.meta_keys import LOW_DTYPE, MARK
from amp_graph.passes.torch_compat.dispatch import OpOverload

# The operand that tells the precision, by operator: what is added to a product may have another one.
OPERANDS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "_scaled_mm", "_grouped_mm"), "self"),
    **dict.fromkeys(("addmm", "_addmm_activation"), "mat1"),
    **dict.fromkeys(("baddbmm", "addbmm"), "batch1"),
    "addmv": "mat",
    **dict.fromkeys(("cudnn_convolution", "mkldnn_convolution"), "self"),
    "scaled_dot_product_attention": "query",
    **dict.fromkeys(
        (
            "linear", "bilinear", "convolution", "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
            "conv_transpose2d", "conv_transpose3d", "lstm", "gru", "_cudnn_rnn", "mkldnn_rnn_layer",
        ),
        "input",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Lost:
    """A product that ran in another precision than planned: ``mm`` of ``node``, planned "bf16", ran in "f32"."""

    node: str
    operator: str
    planned: str
    ran: str

    def __str__(self) -> str:
        """Return a line for reports."""
        return f"{self.node}: {self.operator} ran in {self.ran}, planned {self.planned}"


def name_of(op: OpOverload) -> str:
    """Return ``mm`` for ``aten::mm``."""
    return op._schema.name.partition("::")[2]


def planned(node: Node) -> torch.dtype | None:
    """Return the dtype that the products of a node are planned in; None if there is no plan for them."""
    mark = None if is_part(node) else node.meta.get(MARK)
    owner = node.graph.owning_module
    low = None if owner is None else owner.meta.get(LOW_DTYPE)
    if mark is None or mark.precision not in ("low", "full") or not isinstance(low, torch.dtype):
        return None
    if not any(t.dtype == torch.float32 for t in tensors(captured(node))):
        return None  # the user's own float64, or half precision
    return low if mark.precision == "low" else torch.float32


def lost_in(gm: GraphModule) -> Iterator[Lost]:
    """Yield the products of a rewritten graph whose operands have another dtype than planned."""
    for node in gm.graph.nodes:
        meant = planned(node)
        if meant is not None:
            yield from _lost_by(node, operations_of(node), meant)


def _lost_by(node: Node, operations: Sequence[Operation], meant: torch.dtype) -> Iterator[Lost]:
    inputs = tensor_inputs(node)
    for operation in (o for o in operations if name_of(o.op) in OPERANDS):
        places = operation.operands(OPERANDS[name_of(operation.op)])
        for ran in {t.dtype for i in places if i < len(inputs) for t in tensors(value(inputs[i]))}:
            is_narrower = meant != torch.float32 and ran.itemsize < meant.itemsize
            if ran.is_floating_point and ran != meant and not is_narrower:
                yield Lost(node.name, name_of(operation.op), SHORT[meant], SHORT.get(ran, str(ran)))
