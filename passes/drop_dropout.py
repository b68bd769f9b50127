"""Leave out dropout that drops nothing.

Before: ``linear(dropout(gelu(x), 0.1, training=False), w)``. After: ``linear(gelu(x), w)``: a call less, and whoever
fuses or computes activations again sees what is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.meta_keys import RETURNED
from amp_graph.passes.node_value import captured, tensors
from amp_graph.passes.torch_private import storage_key

# Where each takes how much it drops, and whether it does, with what it takes for that where nothing is said.
DROPOUTS: dict[Any, tuple[tuple[str, Any], tuple[str, Any]]] = {
    F.dropout: (("p", 0.5), ("training", True)),
    torch.dropout: (("p", None), ("train", None)),
}


@dataclass(frozen=True)
class DropDropout(Pass):
    """Replaces ``dropout(x, p, training)`` by ``x`` where it does not train, or ``p`` is 0.

    Law: torch itself returns its argument then, the very tensor (aten/src/ATen/native/Dropout.cpp), so whatever is
    done to one is done to the other; one that is told to write in place stays. Exactness: bit-exact.
    """

    name: ClassVar[str] = "drop-dropout"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every dropout."""
        changes = []
        for node in list(gm.graph.nodes):
            source = given_back(node)
            if source is not None:
                changes.append(Change(self.name, "left out", node.name, "it drops nothing"))
                # Dynamo's fake dropout is a clone: what its memory is called there is that of the argument.
                keys = {key for t in tensors(captured(node)) if (key := storage_key(t)) is not None}
                source.meta[RETURNED] = source.meta.get(RETURNED, frozenset()) | keys
                node.replace_all_uses_with(source)
                gm.graph.erase_node(node)
        return PassResult(gm, tuple(changes))


def given_to(node: Node) -> tuple[Node, Any, Any, bool] | None:
    """Return what a dropout is given: what it drops from, how much, whether it trains, and in place; else None."""
    if node.op != "call_function" or node.target not in DROPOUTS:
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    p, trains = (
        node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
        for place, (name, default) in enumerate(DROPOUTS[node.target], 1)
    )
    in_place = any((*node.args[3:], node.kwargs.get("inplace")))
    return (source, p, trains, in_place) if isinstance(source, Node) else None


def given_back(node: Node) -> Node | None:
    """Return what ``node`` returns as it is, None where it makes something."""
    given = given_to(node)
    if given is None:
        return None
    source, p, trains, in_place = given
    drops_nothing = trains is False or (p == 0 and trains is True)
    return source if drops_nothing and not in_place else None
