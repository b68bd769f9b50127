"""Keep user conversions a copy if they copied at capture, but the value now has the requested dtype already.

Before: ``b = h.bfloat16(); b.mul_(2)``, where ``h`` was lowered: ``b`` would be ``h`` itself, and the write would
change ``h``. After: ``b = h.to(torch.bfloat16, copy=True)``. What is returned may be written by the caller.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import captured, run_node, tensors, value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.precision.classify import CONVERSIONS, is_conversion_target
from amp_graph.passes.torch_compat.fake import FakeTensorMode
from amp_graph.passes.torch_compat.storage import storage_key


def keep_copy(node: Node, memory: Memory, mode: FakeTensorMode) -> bool:
    """Make a conversion copy that copied at capture, if it or its source may be written; say whether it was."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not (is_conversion_target(node) or set(names_of(node)) & CONVERSIONS):
        return False
    became_one = not _share(captured(node), captured(source)) and _share(value(node), value(source))
    written = memory.is_written(node) or memory.is_written(source) or is_returned_copy(node, source, memory)
    if not became_one or not written:
        return False
    node.op, node.target = "call_method", "to"
    node.args, node.kwargs = (source, value(node).dtype), {"copy": True}
    set_value(node, run_node(node, mode))
    return True


def is_returned_copy(made: Node, source: Node, memory: Memory) -> bool:
    """Say whether the caller gets ``made``, a copy of ``source`` at capture, or a view of it.

    A write to it must not reach what backward reads of ``source``, nor other copies of ``source`` that the caller gets.
    """
    of, outputs = memory.storages.get, made.graph.output_node().all_input_nodes
    mine, other, *returned = (of(n, frozenset()) for n in (made, source, *outputs))
    return not mine & other and not mine.isdisjoint(frozenset().union(*returned))


def _share(one: Any, other: Any) -> bool:
    keys = {storage_key(t) for t in tensors(one)} & {storage_key(t) for t in tensors(other)}
    return bool(keys - {None})
