"""The memory that a node allocates: none for a view, or for a write to another value's memory.

``sum(map(size_of, written(node)))`` of a ``linear`` of bf16[8,32]: 512.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.identify_ops import Identity, is_part
from amp_graph.passes.graph.meta_keys import IDENTITY
from amp_graph.passes.torch_compat.fake import numel


def written(node: Node) -> list[torch.Tensor]:
    """Return the tensors that ``node`` creates, each once, without those that it passes through."""
    handed_on = {id(t) for source in node.all_input_nodes for t in tensors(value(source))}
    return list({id(t): t for t in tensors(value(node)) if id(t) not in handed_on}.values())


def writes_memory(node: Node) -> bool:
    """Say whether ``node`` allocates tensors: it is no view, no in-place write and no part of a result."""
    if node.op not in ("call_function", "call_method") or is_part(node) or node_info.is_higher_order(node):
        return False
    identity = node.meta.get(IDENTITY)
    if not isinstance(identity, Identity):
        return True
    return not all(node_info.is_view(o.op) or node_info.is_mutable(o.op) for o in identity.operations)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``'s elements."""
    return tensor.element_size() * numel(tensor)
