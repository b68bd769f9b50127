"""The precision that matrix products, convolutions and attention run in, against the one that was planned.

Before: a node marked "low", whose operator, taken apart, computes ``mm(f32, f32)``. After: a ``Lost`` record of it.
A plan that does not survive lowering gives right numbers slowly, or rounds what was to stay exact: nothing else shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from amp_graph.passes.graph.fake_values import argument_values, captured, tensors, value
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.passes.graph.identify_ops import Operation, is_part, operations_of, tensor_inputs
from amp_graph.passes.graph.meta_keys import LOW_DTYPE, MARK
from amp_graph.passes.graph.node_info import schema_arguments
from amp_graph.passes.torch_compat.dispatch import OpOverload

MATMUL, CONV, ATTENTION, RECURRENT = "matrix product", "convolution", "attention", "recurrent layer"
# The operand that tells the precision, by operator: what is added to a product may have another one.
OPERANDS: Mapping[str, tuple[str, str]] = {
    **{name: (MATMUL, "self") for name in ("mm", "bmm", "mv", "dot", "vdot", "matmul", "_scaled_mm", "_grouped_mm")},
    **{name: (MATMUL, "mat1") for name in ("addmm", "_addmm_activation")},
    **{name: (MATMUL, "batch1") for name in ("baddbmm", "addbmm")},
    **{name: (MATMUL, "input") for name in ("linear", "bilinear", "mkldnn_linear", "_linear_pointwise")},
    "addmv": (MATMUL, "mat"),
    **{
        name: (CONV, "input")
        for name in (
            "convolution", "_convolution", "convolution_backward", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
            "conv_transpose2d", "conv_transpose3d", "_convolution_pointwise",
        )
    },
    **{name: (CONV, "self") for name in ("cudnn_convolution", "mkldnn_convolution")},
    **{
        name: (ATTENTION, "query")
        for name in (
            "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward", "_flash_attention_forward", "_flash_attention_backward",
            "_efficient_attention_forward", "_efficient_attention_backward",
        )
    },
    **{name: (RECURRENT, "input") for name in ("lstm", "gru", "_cudnn_rnn", "mkldnn_rnn_layer")},
}  # fmt: skip


@dataclass(frozen=True)
class Lost:
    """A product that ran in another precision than planned: ``mm`` of ``node``, planned "bf16", ran in "f32"."""

    node: str
    operator: str
    planned: str
    ran: str
    where: str = ""  # "in backward"

    def __str__(self) -> str:
        """Return a line for reports."""
        return (
            f"{self.node}: {self.operator}{self.where and f' {self.where}'} ran in {self.ran}, planned {self.planned}"
        )


def name_of(op: object) -> str:
    """Return ``mm`` for ``aten::mm``; "" for what is no operator."""
    return op._schema.name.partition("::")[2] if isinstance(op, OpOverload) else ""


def kind_of(op: object) -> str:
    """Return what kind of product an operator computes; "" for none, and for operators of this package."""
    if not isinstance(op, OpOverload) or op.namespace == "amp_graph":
        return ""
    return OPERANDS.get(name_of(op), ("", ""))[0]


def ran_in(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the operand of a product; None if it is no float."""
    found = schema_arguments(op, tuple(args), dict(kwargs)).get(OPERANDS[name_of(op)][1])
    return found.dtype if isinstance(found, Tensor) and found.dtype.is_floating_point else None


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


def difference(
    name: str, meant: torch.dtype | None, op: object, ran: torch.dtype | None, where: str = ""
) -> Lost | None:
    """Return a record if a product of the node ``name``, planned in ``meant``, ran in another precision."""
    if meant is None or ran is None or ran == meant or (meant != torch.float32 and ran.itemsize < meant.itemsize):
        return None
    return Lost(name, name_of(op), SHORT[meant], SHORT.get(ran, str(ran)), where)


def lost_in(gm: GraphModule) -> Iterator[Lost]:
    """Yield the products of a rewritten graph whose operands have another dtype than planned."""
    for node in gm.graph.nodes:
        meant = planned(node)
        if meant is not None:
            yield from _lost_by(node, operations_of(node), meant)


def _lost_by(node: Node, operations: Sequence[Operation], meant: torch.dtype) -> Iterator[Lost]:
    inputs = tensor_inputs(node)
    for operation in (o for o in operations if kind_of(o.op)):
        places = operation.operands(OPERANDS[name_of(operation.op)][1])
        for dtype in {t.dtype for i in places if i < len(inputs) for t in tensors(value(inputs[i]))}:
            found = difference(node.name, meant, operation.op, dtype if dtype.is_floating_point else None)
            if found is not None:
                yield found


class Lowered:
    """Compares a rewritten graph with the flat graphs that a compiler made of it, forward first."""

    def __init__(self, gm: GraphModule) -> None:
        """Read the plan of ``gm`` and of its bodies, which a compiler may change."""
        parts = [part for part in gm.modules() if isinstance(part, GraphModule)]
        nodes = [node for part in parts for node in part.graph.nodes]
        self._meant = {node.name: meant for node in nodes if (meant := planned(node)) is not None}
        self._made: dict[int, str] = {}  # nodes by the numbers of their part of autograd's graph
        self.found: dict[Lost, None] = {}

    def look_at(self, graph: Graph) -> None:
        """Note each product of a flat graph that is not as planned."""
        for node in graph.nodes:
            name, number = self._name_of(node), node.meta.get("seq_nr")
            if name and number is not None:
                self._made.setdefault(number, name)
            if kind_of(node.target):
                owner = name or self._made.get(number, "") if number is not None else name
                where = "in backward" if owner and not name else ""
                ran = ran_in(node.target, *argument_values(node))
                lost = difference(owner or node.name, self._meant_for(owner), node.target, ran, where)
                if lost is not None:
                    self.found[lost] = None

    def _meant_for(self, owner: str) -> torch.dtype | None:
        """Return the planned dtype; for a product of unknown origin the one that all of the graph have."""
        every = set(self._meant.values())
        return self._meant.get(owner) if owner else next(iter(every)) if len(every) == 1 else None

    def _name_of(self, node: Node) -> str:
        """Return the planned node that a flat node was traced from; "" if that is not known."""
        left = list(node.meta.get("from_node") or ())
        for source in left:
            if source.name in self._meant:
                return str(source.name)
            left += getattr(source, "from_node", None) or ()
        return ""
