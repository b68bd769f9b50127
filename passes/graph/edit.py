"""Insert and change nodes with complete metadata.

Before: ``gm.graph.call_function(F.gelu, (x,))``, a node without metadata. After: ``put_call(gm, formula, F.gelu,
(x,), mode)``, ``put_before(...)`` or ``describe(node, like, mode)``, which set value, identity, place and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.graph.fake_values import captured, keep_trained, run_node, value
from amp_graph.passes.graph.identify_ops import identify
from amp_graph.passes.graph.match import PLACE, Formula
from amp_graph.passes.graph.meta_keys import CAPTURED, GRAD, IDENTITY, MARK, MODULE
from amp_graph.passes.torch_compat.fake import FakeTensorMode

# Meta keys about where a node is in the user's code.
PLACE_IN_CODE = ("stack_trace", "nn_module_stack", "example_value", MODULE, GRAD)
# Meta keys about a node's own operation and value, which a replacement does not inherit.
OWN = (IDENTITY, MARK, "val", CAPTURED)


def set_value(node: Node, new: Any) -> None:
    """Store ``new`` under the keys that this project and Dynamo's backends read.

    Values are computed without gradients, so ``requires_grad`` is copied from the captured value.
    """
    keep_trained(new, captured(node))
    node.meta["val"] = new
    if "example_value" in node.meta:
        node.meta["example_value"] = new


def give_value(node: Node, val: Any) -> None:
    """Set ``val`` as the value and the captured value of ``node``, for a node that a pass inserted."""
    node.meta["val"] = node.meta[CAPTURED] = val
    if "example_value" in node.meta:
        node.meta["example_value"] = val


def set_identity(node: Node, mode: FakeTensorMode) -> None:
    """Identify ``node`` after a pass created or changed it; a node that cannot be traced alone gets no identity."""
    node.meta.pop(IDENTITY, None)
    if not isinstance(operations := identify(node, mode), str):
        node.meta[IDENTITY] = operations


def recompute(node: Node, mode: FakeTensorMode) -> Any:
    """Give ``node`` the value and the identity that it has with its operands now; return the value before."""
    before, new = value(node), run_node(node, mode)
    keep_trained(new, before)
    give_value(node, new)
    set_identity(node, mode)
    return before


def take_over(made: Node, like: Node, val: Any, without: Collection[str] = OWN) -> Node:
    """Give ``made`` the value ``val`` and the meta of ``like``, except the keys ``without``; return it."""
    made.meta = {k: v for k, v in like.meta.items() if k not in without}
    give_value(made, val)
    return made


def place_like(made: Node, like: Node, val: Any, more: Collection[str] = ()) -> Node:
    """Give ``made`` the value ``val``, and of ``like`` the place in the user's code, and ``more`` keys; return it."""
    made.meta = {k: v for k, v in like.meta.items() if k in PLACE_IN_CODE or k in more}
    give_value(made, val)
    return made


def describe(made: Node, like: Node, mode: FakeTensorMode) -> Node:
    """Set the metadata of ``made``, which a pass inserted: value and identity; place and gradient as of ``like``."""
    made.meta = {k: v for k, v in like.meta.items() if k not in (IDENTITY, MARK, "val")}
    new = run_node(made, mode)  # data-dependent sizes are those of ``like``
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
    """Replace a formula by ``function(*args, **kwargs)``, and return the new node with its identity set."""
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
    """Insert ``function(operand, *args)`` before ``place``; gradient, region and checkpoint are those of ``operand``.

    ``like``: a node to take region and checkpoint from instead, such as one of a layer recomputed in backward.
    """
    with gm.graph.inserting_before(place):
        made = describe(gm.graph.call_function(function, (operand, *args)), operand, mode)
    if like is not None:
        elsewhere = {key: mark for key, mark in made.meta.items() if key not in PLACE}
        made.meta = elsewhere | {key: like.meta[key] for key in PLACE if key in like.meta}
    return made


def inline(
    gm: GraphModule, part: Graph, given: Iterable[Any], before: Node, attribute: Callable[[Node], Node]
) -> tuple[Any, list[Node]]:
    """Copy the nodes of ``part`` before a node of ``gm``; return what ``part`` returns, and the copies.

    ``given``: what its inputs are, in order. ``attribute``: inserts what ``gm`` has for an attribute of ``part``.
    """
    env: dict[Node, Any] = {}
    operands, made = iter(given), []
    with gm.graph.inserting_before(before):
        for node in part.nodes:
            if node.op == "placeholder":
                env[node] = next(operands)
            elif node.op == "get_attr":
                env[node] = attribute(node)
            elif node.op != "output":
                env[node] = gm.graph.node_copy(node, lambda n: env[n])
                made.append(env[node])
    return map_arg(part.output_node().args[0], lambda n: env[n]), made


def replace_by(node: Node, result: Any) -> None:
    """Replace ``node`` by ``result``, which has parts, some of them None, if all readers of ``node`` take one part."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for part in list(node.users):
            new = result[part.args[1]]
            for reader in list(part.users):
                swap = lambda n, old=part, new=new: new if n is old else n  # noqa: E731
                reader.args, reader.kwargs = map_arg(reader.args, swap), map_arg(reader.kwargs, swap)
            node.graph.erase_node(part)
    node.graph.erase_node(node)
