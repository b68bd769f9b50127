"""Append what a function computes to a graph: traced on the values of its nodes, then inlined; and add inputs.

Before: ``unscale(grads, scale)``, a function of tensors. After: its operations behind those of the graph, as nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from amp_graph.passes.base import PassError
from amp_graph.passes.graph.edit import inline
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from amp_graph.passes.graph.meta_keys import INPUT
from amp_graph.passes.loss_scaling.joint_graph import change_joint, joint_of, like_in
from amp_graph.passes.torch_compat.fake import FakeTensor, FakeTensorMode, make_fx, tracing_fake


class StateInput(NamedTuple):
    """An input that a pass adds: its name in the graph, a tensor like the one that is given, its name for people."""

    name: str
    like: torch.Tensor
    shown: str = ""


def append(gm: GraphModule, function: Callable[..., Any], *given: Any, before: Node | None = None) -> Any:
    """Trace ``function`` on ``given``, with nodes for tensors, and put its operations ``before`` a node of ``gm``.

    ``before``: None stands for the output, behind everything. Returns what the function returns, with nodes for
    tensors. Law: the graph computes what the function does, with the same operations in the same order.
    """
    leaves, shape = tree_flatten(given)
    sources = [leaf for leaf in leaves if isinstance(leaf, Node)]
    mode = mode_of(gm)
    returned: list[Any] = []

    def call(*values: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(values)
        args = tree_unflatten([next(rest) if isinstance(leaf, Node) else leaf for leaf in leaves], shape)
        found, spec = tree_flatten(function(*args))
        returned[:] = [spec, found]
        return [t for t in found if isinstance(t, torch.Tensor)]

    values = [v if isinstance(v, FakeTensor) and v.fake_mode is mode else like_in(mode, v) for v in map(value, sources)]
    symbolic = any(type(n) is not int for v in values for n in v.shape)
    with torch.no_grad(), tracing_fake(mode, symbolic=symbolic):
        traced = make_fx(call, tracing_mode="real")(*values)  # they are fake: "fake" would convert each once more

    def held(node: Node) -> Node:
        found = gm.graph.get_attr(_take_over(gm, traced, str(node.target)))
        found.meta = dict(node.meta)
        return found

    made = iter(inline(gm, traced.graph, sources, before or gm.graph.output_node(), held)[0])
    spec, found = returned
    return tree_unflatten([next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in found], spec)


def _take_over(gm: GraphModule, traced: GraphModule, name: str) -> str:
    """Give ``gm`` the constant or subgraph ``name`` of ``traced``, under a name of its own; return that."""
    free = f"appended_{name.replace('.', '_')}"
    while hasattr(gm, free):
        free += "_"
    setattr(gm, free, traced.get_parameter(name) if name in dict(traced.named_parameters()) else getattr(traced, name))
    return free


def add_inputs(gm: GraphModule, wanted: Sequence[StateInput]) -> list[Node]:
    """Return the inputs ``wanted`` of a joint graph, in order; those that it lacks are added behind all others."""
    known = {str(n.target): n for n in gm.graph.find_nodes(op="placeholder")}
    missing = [one for one in wanted if one.name not in known]
    if missing:
        mode = mode_of(gm)
        first = next(n for n in gm.graph.nodes if n.op != "placeholder")
        with gm.graph.inserting_before(first):
            for name, like, shown in missing:
                known[name] = made = gm.graph.placeholder(name)
                made.meta = {"val": like_in(mode, like), INPUT: shown or name}
        taken = next((one.name for one in missing if known[one.name].name != one.name), None)
        if taken is not None:
            raise PassError(f"joint graph: the name {taken} is taken by another node\n  fix:   rename that node")
        change_joint(gm, inputs=(*joint_of(gm).inputs, *(one.name for one in missing)))
    return [known[one.name] for one in wanted]


def mode_of(gm: GraphModule) -> FakeTensorMode:
    """Return the fake mode of the graph's values; PassError where there are none."""
    mode = fake_mode_of(gm)
    if mode is None:
        raise PassError("joint graph: its nodes have no values\n  fix:   name_joint(gm, ...) before any pass")
    return mode
