"""Trace one node into its own small graph of ATen operations.

Before: ``multi_head_attention_forward(x, ...)``, one call of the user. After: ``aten.linear``, ``aten.baddbmm``, ...,
with placeholders for its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from amp_graph.passes.graph.decompositions import DECOMPOSITIONS
from amp_graph.passes.graph.fake_values import argument_values, tensors, value
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import (
    SYMBOLIC,
    FakeTensorMode,
    concrete_number,
    empty_of_numbers,
    make_fx,
    tracing_fake,
)


def trace_node(
    node: Node,
    mode: FakeTensorMode,
    decompose: frozenset[OpOverload] = frozenset(),
    *,
    symbolic: bool = False,
) -> GraphModule:
    """Return the node's own small graph of ATen operations, one placeholder per tensor argument.

    Symbolic sizes are traced as numbers, in a separate fake mode: they do not decide which operations run, and
    tracing must not add guards to the user's sizes. ``symbolic`` keeps them, for a graph that will run; then a
    symbolic number is an input, like a tensor.
    """
    flat, spec, mode = argument_leaves(node, mode, symbolic=symbolic)
    places: dict[int, list[int]] = {}
    for i, leaf in enumerate(flat):
        if isinstance(leaf, (torch.Tensor, torch.SymInt)):
            places.setdefault(id(leaf), []).append(i)

    def call(*given: torch.Tensor) -> Any:
        leaves = list(flat)
        for same, tensor in zip(places.values(), given, strict=True):
            for place in same:
                leaves[place] = tensor
        return call_node(node, *tree_unflatten(leaves, spec))

    table = {op: DECOMPOSITIONS.get(op, op.decompose) for op in decompose}
    with tracing_fake(mode, symbolic=symbolic):
        # Detached: in the user's no_grad, an in-place operation on a leaf that requires a gradient is legal.
        given = [f.detach() if isinstance(f := flat[same[0]], torch.Tensor) else f for same in places.values()]
        return make_fx(call, pre_dispatch=True, decomposition_table=table)(*given)


def argument_leaves(node: Node, mode: FakeTensorMode, *, symbolic: bool) -> tuple[list[Any], TreeSpec, FakeTensorMode]:
    """Return the leaves of the node's arguments, their structure, and the fake mode of their tensors."""
    flat, spec = tree_flatten(argument_values(node))
    if not symbolic and any(_is_symbolic(leaf) for leaf in flat):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        once = {id(leaf): _concrete(leaf, mode) for leaf in flat}
        flat = [once[id(leaf)] for leaf in flat]
    return flat, spec, mode


def call_node(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function or the method of ``node``."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*leaf.shape, *leaf.stride()))
    if isinstance(leaf, slice):
        return any(_is_symbolic(part) for part in (leaf.start, leaf.stop, leaf.step))
    return isinstance(leaf, SYMBOLIC)


def _concrete(leaf: Any, mode: FakeTensorMode) -> Any:
    """Return ``leaf`` in ``mode``, with numbers for its symbolic sizes."""
    if isinstance(leaf, SYMBOLIC):
        return concrete_number(leaf)
    if isinstance(leaf, slice):
        return slice(*(_concrete(part, mode) for part in (leaf.start, leaf.stop, leaf.step)))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        return empty_of_numbers(leaf)


def traced_inputs(node: Node) -> list[Node]:
    """Return the nodes for the placeholders of ``trace_node(..., symbolic=True)``, in order."""
    flat, _ = tree_flatten((node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Node))
    found: dict[int, Node] = {}
    for leaf in flat:
        if isinstance(leaf, Node):
            given = [value(leaf)] if isinstance(value(leaf), torch.SymInt) else tensors(value(leaf))
            found.update((id(one), leaf) for one in given)
    return list(found.values())
