"""Leave only operators and casts that any program which loads a graph of torch.export knows.

Before: ``h = x.half(); y = F.gelu(h)``, a method and a Python function. After: ``h = aten._to_copy(x, dtype=float16);
y = aten.gelu(h)``; and an error for what cannot be written so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, VerifyError
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.edit import describe
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.graph_text import target_text
from amp_graph.passes.graph.identify_ops import is_tensor_call, names_of
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.precision.classify import CONVERSIONS, is_conversion_target
from amp_graph.passes.precision.decompose_composites import expand
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensorMode
from amp_graph.passes.torch_compat.operators import ASSERT_TENSOR_METADATA, TO_COPY

CAST_OP = TO_COPY
ASSERTS = (ASSERT_TENSOR_METADATA,)
GUARDS = "_guards_fn"  # what torch.export calls its check of the inputs


@dataclass(frozen=True)
class UsePortableOps(NodePass):
    """Replaces methods and Python functions by the ATen operators that they call, and casts by ``aten._to_copy``.

    Exactness: bit-exact, as the same operators run.
    """

    required: ClassVar[bool] = True

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Replace a node that computes on tensors."""
        if not is_tensor_call(node):
            return None
        if _is_plain_cast(node):
            node.op, node.target = "call_function", CAST_OP
            node.args, node.kwargs = node.args[:1], {"dtype": value(node).dtype}
            return Change(self.name, "a cast operator", node.name, "methods are not portable")
        made = None if isinstance(node.target, OpOverload) else expand(gm, node, frozenset(), mode)
        if made is None:
            return None
        what = ", ".join(part.name for part in made) or "it is its input"
        return Change(self.name, "its ATen operators", node.name, what)


def _is_plain_cast(node: Node) -> bool:
    """Say whether ``node`` is an inserted cast, or another conversion that is not written as an ATen cast already."""
    if isinstance(node.target, OpOverload) and len(node.all_input_nodes) == 1:
        return False
    names = names_of(node)
    if not (CAST in node.meta or is_conversion_target(node) or (names and {*names} <= CONVERSIONS)):
        return False
    source = node.args[0] if node.args else None
    made, given = value(node), value(source) if isinstance(source, Node) else None
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor) or node.kwargs.get("memory_format"):
        return False
    return made.device == given.device and made.dtype != given.dtype


def drop_metadata_asserts(gm: GraphModule) -> None:
    """Remove torch.export's checks that a value has its captured dtype, which the plan changes."""
    for node in list(gm.graph.nodes):
        if node.target in ASSERTS and not node.users:
            gm.graph.erase_node(node)


@dataclass(frozen=True)
class CheckPortable(NodePass):
    """Refuses a node that other programs cannot load, and operands of two floating-point dtypes.

    Exactness: bit-exact, as nothing changes.
    """

    required: ClassVar[bool] = True

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> None:
        """Raise VerifyError for a node that is refused."""
        if why := _not_portable(node):
            raise VerifyError(
                f"portable: {node.name} = {target_text(node)}: {why}{node_info.at_line(node)}\n"
                "  legal: ATen operators and casts whose floating-point operands have one dtype\n"
                "  fix:   rewrite(torch.export.export(model, args).module(), portable=True), or portable=False"
            )


def _not_portable(node: Node) -> str:
    """Return why ``node`` is not portable; "" if it is."""
    if node.op == "call_module":
        return "" if node.target == GUARDS else "a module call"
    if not is_tensor_call(node):
        return ""
    if node.op == "call_method":
        return "a method call"
    target = node.target
    if not isinstance(target, OpOverload):
        return "a Python function"
    if target.namespace.startswith("amp_graph"):
        return "an operator of amp_graph"
    found = sorted({str(t.dtype).removeprefix("torch.") for t in float_operands(node)})
    return f"operands of {' and '.join(found)}" if len(found) > 1 else ""


def float_operands(node: Node) -> list[torch.Tensor]:
    """Return the floating-point tensors that ``node`` reads."""
    return [t for source in node.all_input_nodes for t in tensors(value(source)) if t.is_floating_point()]


def put_cast(before: Node, source: Node, dtype: torch.dtype, mode: FakeTensorMode) -> Node:
    """Insert a cast of ``source`` before a node, and return it."""
    with before.graph.inserting_before(before):
        return describe(before.graph.call_function(CAST_OP, (source,), {"dtype": dtype}), source, mode)
