"""How passes put nodes into a graph: what new and changed nodes must know, in one place.

Before: ``gm.graph.call_function(F.gelu, (x,))``, of which nothing is known. After: ``put_call(gm, formula, F.gelu,
(x,), mode)``, ``put_before(...)`` or ``describe(node, like, mode)``: value, identity, place and gradient are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import captured, keep_trained, run_node, value
from amp_graph.passes.graph.identify_ops import Identity, identify
from amp_graph.passes.graph.match import PLACE, Formula
from amp_graph.passes.graph.meta_keys import CAPTURED, IDENTITY, MARK
from amp_graph.passes.torch_compat.fake import FakeTensorMode

# What a node knows of its own operation and value alone, which one in its place does not take over.
OWN = (IDENTITY, MARK, "val", "example_value", CAPTURED)


def set_value(node: Node, new: Any) -> None:
    """Store ``new`` where this project and where Dynamo's backends read it.

    Values are computed without gradients here; which ones gradients flow through stays known all the same.
    """
    keep_trained(new, captured(node))
    node.meta["val"] = new
    if "example_value" in node.meta:
        node.meta["example_value"] = new


def give_value(node: Node, val: Any) -> None:
    """Let ``val`` be the value of ``node`` and the one that it was captured with, as of a node that a pass put in."""
    node.meta["val"] = node.meta[CAPTURED] = val
    if "example_value" in node.meta:
        node.meta["example_value"] = val


def set_identity(node: Node, mode: FakeTensorMode) -> None:
    """Identify ``node``, whose call a pass made or changed; one that cannot be traced alone has no identity."""
    identity = identify(node, mode)
    if isinstance(identity, Identity):
        node.meta[IDENTITY] = identity
    else:
        node.meta.pop(IDENTITY, None)


def take_over(made: Node, like: Node, val: Any, without: Collection[str] = OWN) -> Node:
    """Give ``made`` the value ``val``, and what ``like`` has in its meta but for the keys ``without``; return it."""
    made.meta = {k: v for k, v in like.meta.items() if k not in without}
    if "example_value" in like.meta:
        made.meta["example_value"] = val
    give_value(made, val)
    return made


def describe(made: Node, like: Node, mode: FakeTensorMode) -> Node:
    """Give ``made``, which a pass put in, what captured nodes have: value, identity, place and gradient of ``like``."""
    made.meta = {k: v for k, v in like.meta.items() if k not in (IDENTITY, MARK, "val")}
    new = run_node(made, mode)  # sizes that depend on data are those that ``like`` was captured with
    keep_trained(new, captured(like))
    give_value(made, new)
    set_identity(made, mode)
    return made


def put_call(
    gm: GraphModule,
    found: Formula,
    function: Callable[..., Any],
    args: Sequence[Any],
    mode: FakeTensorMode,
    **kwargs: Any,
) -> Node:
    """Put ``function(*args, **kwargs)`` in the place of a formula, identified; return it."""
    last = found.last
    with gm.graph.inserting_after(last):
        fused = gm.graph.call_function(function, tuple(args), kwargs)
    fused.meta = {k: v for k, v in last.meta.items() if k != IDENTITY}
    last.replace_all_uses_with(fused)
    for node in reversed([n for n in gm.graph.nodes if n in found.inside]):
        gm.graph.erase_node(node)
    assert isinstance(value(fused), torch.Tensor), "a formula gives a tensor"
    set_identity(fused, mode)
    return fused


def put_before(
    gm: GraphModule,
    place: Node,
    function: Callable[..., Any],
    operand: Node,
    *args: Any,
    mode: FakeTensorMode,
    like: Node | None = None,
) -> Node:
    """Put ``function(operand, *args)`` before ``place``; return it, which is trained and where ``operand`` is.

    ``like``: a node that tells where it is instead, as of a layer that is computed again in backward.
    """
    with gm.graph.inserting_before(place):
        made = describe(gm.graph.call_function(function, (operand, *args)), operand, mode)
    if like is not None:
        elsewhere = {key: mark for key, mark in made.meta.items() if key not in PLACE}
        made.meta = elsewhere | {key: like.meta[key] for key in PLACE if key in like.meta}
    return made
