"""Keys of operations that every capture of a model shares: module path, operation, and its number there.

Before: node ``linear_7``, whose number changes with the code around it. After: ``layers.3.fc:linear``, and
``layers.3:add.1`` for the second addition in that module. ``layers.3.fc:layers.3.cond/0/linear`` is inside of the first
branch of a ``torch.cond`` in ``layers.3``.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule, Node

from amp_graph.passes.graph.identify_ops import is_tensor_call, names_of
from amp_graph.passes.graph.meta_keys import INSIDE
from amp_graph.passes.graph.node_info import module_path


def node_keys(gm: GraphModule) -> dict[Node, str]:
    """Return the key of every operation on tensors in ``gm``, in graph order; the keys of a graph are distinct.

    Those of the bodies in it are distinct from these once ``bodies_of(gm)`` has told each its place.
    """
    inside = gm.meta.get(INSIDE, "")
    counts: dict[str, int] = {}
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if not is_tensor_call(node):
            continue
        stem = f"{module_path(node)}:{inside}{operation_name(node)}"
        number = counts.get(stem, 0)
        counts[stem] = number + 1
        found[node] = f"{stem}.{number}" if number else stem
    return found


def operation_name(node: Node) -> str:
    """Return the name of the node's operation, such as ``linear``; of several, joined by ``+``."""
    names = names_of(node) or (str(getattr(node.target, "__name__", node.target)),)
    return "+".join(name.removeprefix("aten.") for name in names)


def module_of(key: str) -> str:
    """Return the module path of a key; "" for the model itself."""
    return key.rpartition(":")[0]


def unmatched_keys(names: Collection[str], keys: Collection[str]) -> dict[str, list[str]]:
    """Return which of ``names`` are none of the ``keys`` of a graph, each with the keys of its module and body."""
    return {name: [key for key in keys if _place(key) == _place(name)] for name in names if name not in keys}


def _place(key: str) -> tuple[str, str]:
    """Return the module path of a key, and where its operation is in the bodies of that module."""
    return module_of(key), key.rpartition(":")[2].rpartition("/")[0]


def few(names: list[str]) -> str:
    """Return a list of names for a message, of which all but three are counted only."""
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")
