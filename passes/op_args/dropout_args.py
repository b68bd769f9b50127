"""Read the arguments of dropout calls, and find calls that drop nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

# Name and default of the probability and of the training flag, per function.
DROPOUTS: dict[Any, tuple[tuple[str, Any], tuple[str, Any]]] = {
    F.dropout: (("p", 0.5), ("training", True)),
    torch.dropout: (("p", None), ("train", None)),
}


def given_to(node: Node) -> tuple[Node, Any, Any, bool] | None:
    """Return input, probability, training flag and in-place flag of a dropout call; None for other nodes."""
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
    """Return the input of a dropout that returns its input itself; None for other nodes."""
    given = given_to(node)
    if given is None:
        return None
    source, p, trains, in_place = given
    drops_nothing = trains is False or (p == 0 and trains is True)
    return source if drops_nothing and not in_place else None
