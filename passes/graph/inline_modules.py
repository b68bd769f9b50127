"""Replace calls of torch.nn modules by the functions that they call, so that parameters can be cast.

Before: ``call_module fc(x)``. After: ``linear(x, fc.weight, fc.bias)``. Exactness: bit-exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, Tracer

from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.meta_keys import MODULE


class _NoLeaves(Tracer):
    """Traces into every module, and records what is done with its buffers instead of doing it."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """No module is a leaf."""
        return False


def inline_modules(gm: GraphModule) -> GraphModule:
    """Inline every call of a module that can be traced alone; other module calls stay as captured.

    Those stay, too, of a module with hooks, which a trace of its forward leaves out, with several results, or with any
    number of arguments.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and not isinstance(gm.get_submodule(str(node.target)), GraphModule):
            _inline(gm, node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _inline(gm: GraphModule, node: Node) -> None:
    path = str(node.target)
    module = gm.get_submodule(path)
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return
    with Attempt() as tried:
        inner = _NoLeaves().trace(module)
    if tried.error is not None:  # a module whose forward depends on values stays a call
        return
    placeholders, result = inner.find_nodes(op="placeholder"), inner.output_node().args[0]
    if not isinstance(result, Node) or any(str(place.target).startswith("*") for place in placeholders):
        return
    given: list[Any] = [*node.args]
    env: dict[Node, Any] = {}
    for position, place in enumerate(placeholders):
        fallback = place.args[0] if place.args else None
        env[place] = given[position] if position < len(given) else node.kwargs.get(str(place.target), fallback)
    with gm.graph.inserting_before(node):
        for part in inner.nodes:
            if part.op == "get_attr":
                env[part] = gm.graph.get_attr(f"{path}.{part.target}")
            elif part.op not in ("placeholder", "output"):
                env[part] = gm.graph.node_copy(part, lambda n: env[n])
            if part.op not in ("placeholder", "output"):
                env[part].meta[MODULE] = path
    node.replace_all_uses_with(env[result])
    gm.graph.erase_node(node)
