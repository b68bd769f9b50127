"""Names captured nodes and inputs as the user knows them: by module paths and argument names.

Before: ``L['self']._modules['fc']._parameters['weight']``. After: ``fc.weight``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.passes.graph.meta_keys import INPUT, MODULE, WISH
from amp_graph.passes.graph.node_info import clean_path, with_parents
from amp_graph.passes.torch_compat.modules import plain_attribute


def name_nodes(
    gm: GraphModule, model: torch.nn.Module, forward: Callable[..., Any], whole: torch.nn.Module | None = None
) -> None:
    """Record on nodes their module's path in ``whole``, also after a graph break, and name the inputs.

    ``forward`` of ``model``, which is ``whole`` or a part of it, is what was captured: its arguments are named. The
    precision of decorated modules (``amp_graph.precision``) is recorded on their nodes.
    """
    whole = whole or model
    names = {str(id(m)): name for name, m in whole.named_modules()}
    path = names.get(str(id(model)), "")
    prefix = [path] if path else []
    arguments = list(inspect.signature(forward).parameters)
    wishes = {name: wish for name, m in whole.named_modules() if (wish := plain_attribute(m, "amp_precision"))}
    named: dict[str, str] = {}  # of the outer graph's inputs: what a loop reads there has the same name inside
    for part in (gm, *[m for m in gm.modules() if isinstance(m, GraphModule) and m is not gm]):
        for node in part.graph.nodes:
            if node.op == "placeholder":
                node.meta[INPUT] = named.get(node.name) or _input_name(node, arguments, prefix)
                if part is gm:
                    named[node.name] = node.meta[INPUT]
            stack = node.meta.get("nn_module_stack") or {}
            # The key of a module is its id; that of its second call, the id and "@1".
            paths = [names[own] for key in stack if (own := str(key).partition("@")[0]) in names]
            inner = str(list(stack.values())[-1][0]) if stack else path
            node.meta[MODULE] = paths[-1] if paths else clean_path(inner)
            wish = next((wishes[p] for p in reversed(["", *with_parents(node.meta[MODULE])]) if p in wishes), None)
            if wish:
                node.meta[WISH] = (wish, "set by its author with amp_graph.precision")


def _input_name(node: torch.fx.Node, names: Sequence[str], prefix: Sequence[str]) -> str:
    """Return an input's name as the user writes it: ``encoder.0.weight``, of the model at ``prefix``, or ``x``."""
    source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    text = str(source() if callable(source) else source)
    found = re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", text)
    return ".".join([*prefix, *found]) if found else user_name(text, names) or str(node.target)


def user_name(source: str, names: Sequence[str]) -> str:
    """Return a Dynamo name as the user writes it: ``self.calls``, ``x``."""

    def argument(found: re.Match[str]) -> str:
        place = int(found[1])
        return names[place] if place < len(names) else f"args[{place}]"

    text = re.sub(r"L\['args'\]\[(\d+)\]", argument, source)
    text = re.sub(r"L\['(?:forward|model)'\]\.__self__|L\['model'\]", "self", text)
    text = re.sub(r"[LG](?:\['kwargs'\])?\['([^']+)'\]", r"\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    return text
