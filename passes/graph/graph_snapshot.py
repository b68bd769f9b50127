"""Save a graph, and restore it after a failed pass.

Before: ``restore = snapshot(gm)``, then a pass that raises. After ``restore()``: ``gm`` as before the pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container

import torch
from torch.fx import Graph, GraphModule, Node

# Attribute with the source of an input, set by Dynamo, read by AOTAutograd for each input (2.11 - 2.13).
_SOURCE = "_dynamo_source"


def snapshot(gm: GraphModule) -> Callable[[], None]:
    """Copy everything that a pass may change; return what restores it, as often as it is called.

    That is the nodes, with their metadata, and the graph's; attributes that were added since are removed. Tensors are
    shared, and so are inner graphs.
    """
    graph, meta, attributes = copied_graph(gm), dict(gm.meta), _attributes(gm)

    def restore() -> None:
        for name in _attributes(gm) - attributes:
            delattr(gm, name)
        gm.graph = copied_graph(gm, graph)
        gm.meta.clear()
        gm.meta.update(meta)

    return restore


def _attributes(gm: GraphModule) -> set[str]:
    """Return the names of the tensors and submodules of ``gm``."""
    return {*gm._modules, *gm._parameters, *gm._buffers}


def copied_graph(gm: GraphModule, source: Graph | None = None, without: Container[str] = ()) -> Graph:
    """Copy the graph of ``gm``, or ``source``, node by node, with metadata except the keys ``without``."""
    source = gm.graph if source is None else source
    graph = torch.fx.Graph(owning_module=gm, tracer_cls=getattr(source, "_tracer_cls", None))
    seen: dict[Node, Node] = {}
    result = graph.graph_copy(source, val_map=seen)
    output = source.output_node()
    new = graph.output(result)
    new.meta = dict(output.meta)
    graph._codegen = copy.copy(source._codegen)
    for old, made in seen.items():
        made.meta = {k: v for k, v in old.meta.items() if k not in without}
        if hasattr(old, _SOURCE):
            setattr(made, _SOURCE, getattr(old, _SOURCE))
    return graph
