"""Save a graph, and restore it after a failed pass.

Before: ``saved = Snapshot.of(gm)``, then a pass that raises. After ``saved.restore()``: ``gm`` as before the pass.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

# Attribute with the source of an input, set by Dynamo, read by AOTAutograd for each input (2.11 - 2.13).
_SOURCE = "_dynamo_source"


@dataclass(frozen=True)
class Snapshot:
    """The nodes, the metadata and the attributes of a graph module; tensors are shared, and so are inner graphs."""

    gm: GraphModule
    graph: Graph
    meta: dict[str, Any]
    attributes: frozenset[str]

    @staticmethod
    def of(gm: GraphModule) -> Snapshot:
        """Copy everything that a pass may change."""
        return Snapshot(gm, copied_graph(gm), dict(gm.meta), frozenset(_attributes(gm)))

    def restore(self) -> None:
        """Restore the nodes, and remove attributes that were added since; may be called again."""
        for name in _attributes(self.gm) - self.attributes:
            delattr(self.gm, name)
        self.gm.graph = copied_graph(self.gm, self.graph)
        self.gm.meta.clear()
        self.gm.meta.update(self.meta)


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
