"""A rewritten graph and the graphs inside of it, and what their nodes are: casts of ours, planned operations, inputs.

Before: a ``Rewritten``. After: a ``Part`` for it and for each of its subgraphs, ``wrap_body_0/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import CAST, INPUT, MARK
from amp_graph.passes.manager import Timed
from amp_graph.passes.precision.plan_precision import Mark
from amp_graph.passes.weights.batch_weight_casts import low_weight
from amp_graph.passes.weights.cast_weights import cast_weight
from amp_graph.passes.weights.frozen_weights import is_frozen
from amp_graph.rewrite import Rewritten


@dataclass(frozen=True)
class Part:
    """A graph, or one inside it: its path (``wrap_body_0/``), and what the passes recorded.

    ``names`` are those of the lines of ``before``. ``kept`` are the nodes that stay in full precision because their
    kernel refused low operands, with its error.
    """

    path: str
    gm: GraphModule
    before: str
    passes: tuple[Timed, ...]
    kept: dict[str, str]
    names: tuple[str, ...] = ()


def parts_of(rewritten: Rewritten, path: str = "") -> Iterator[Part]:
    """Yield a rewritten graph and all its subgraphs."""
    changes = [change for timed in rewritten.passes for change in timed.result.changes]
    kept = {change.node: change.reason for change in changes if change.action == "kept full"}
    yield Part(path, rewritten.gm, rewritten.before, rewritten.passes, kept, rewritten.names)
    for node in rewritten.gm.graph.nodes:
        body, name = graph_read(rewritten.gm, node), str(node.target)
        if body is not None and name in rewritten.bodies:
            yield from parts_of(rewritten.bodies[name], f"{path}{name}/")
        elif body is not None:  # left as captured, or a checkpoint rebuilt from nodes of this graph
            yield Part(f"{path}{name}/", body, "", (), kept)


def is_cast(node: Node) -> bool:
    """Say whether ``node`` is a cast that the passes inserted."""
    ours = node.target in (low_weight, cast_weight, shared_cast) or is_frozen(node)
    return CAST in node.meta and (node.op == "call_method" or ours)


def cast_dtype(node: Node) -> torch.dtype:
    """Return the dtype that a cast converts to."""
    dtype: Any = node.args[1] if node.target is shared_cast else value(node).dtype
    assert isinstance(dtype, torch.dtype), "a cast is to a dtype"
    return dtype


def mark_of(node: Node) -> Mark | None:
    """Return the plan's mark on ``node``; None on plumbing, which may carry its producer's."""
    return None if is_part(node) else node.meta.get(MARK)


def shown_name(node: Node) -> str:
    """Return a node's displayed name: an input's own name, or the node's name."""
    if node.op == "placeholder":
        return node_info.clean_path(str(node.meta.get(INPUT, node.target))) or node.name
    return str(node.target) if node.op == "get_attr" else node.name
