"""A rewritten graph and the graphs inside of it, and what their nodes are: casts of ours, planned operations, inputs.

Before: a ``Rewritten``. After: a ``Part`` for it and for each of its subgraphs, ``wrap_body_0/``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.casts.share_casts import shared_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import CapturedNode
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import CAST, INPUT, MARK
from amp_graph.passes.manager import Timed
from amp_graph.passes.precision.plan_precision import Mark
from amp_graph.passes.weights.batch_weight_casts import low_weight
from amp_graph.passes.weights.frozen_weights import is_frozen
from amp_graph.rewrite import Rewritten


@dataclass(frozen=True)
class Part:
    """A graph, or one inside it: its path (``wrap_body_0/``), and what the passes recorded.

    ``captured`` are its nodes as captured. ``kept`` are the nodes that stay in full precision because their
    kernel refused low operands, with its error.
    """

    path: str
    gm: GraphModule
    passes: tuple[Timed, ...]
    kept: dict[str, str]
    captured: tuple[CapturedNode, ...] = ()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the nodes as captured."""
        return frozenset(node.name for node in self.captured)


def parts_of(rewritten: Rewritten, path: str = "") -> Iterator[Part]:
    """Yield a rewritten graph and all its subgraphs."""
    changes = (change for timed in rewritten.passes for change in timed.result.changes)
    kept = {change.node: change.reason for change in changes if change.action == "kept full"}
    yield Part(path, rewritten.gm, rewritten.passes, kept, rewritten.captured)
    for node in rewritten.gm.graph.nodes:
        body, name = graph_read(rewritten.gm, node), str(node.target)
        if body is not None and name in rewritten.bodies:
            yield from parts_of(rewritten.bodies[name], f"{path}{name}/")
        elif body is not None:  # left as captured, or a checkpoint rebuilt from nodes of this graph
            yield Part(f"{path}{name}/", body, (), kept)


def is_cast(node: Node) -> bool:
    """Say whether ``node`` is a cast that the passes inserted."""
    return CAST in node.meta and (
        node.op == "call_method" or node.target in (low_weight, shared_cast) or is_frozen(node)
    )


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


# -- the graph as captured ----------------------------------------------------------------------------


def captured_in(part: Part, weights: Collection[str]) -> Iterator[CapturedNode]:
    """Yield the nodes of ``part`` as captured; ``weights``: the names of the model's parameters and buffers."""
    for node in part.captured:
        is_weight = node.kind in ("input", "constant") and node.call in weights
        yield replace(
            node, name=part.path + node.name, number=part.path + node.number,
            sources=tuple(part.path + name for name in node.sources),
            **({"kind": "weight", "module": node.call.rpartition(".")[0]} if is_weight else {}),
        )  # fmt: skip
