"""Keep the effect of the user's own conversions in a graph that is captured under autocast.

Before: ``h.half()`` after a ``print``, where autocast already made ``h`` fp16, so that the result is ``h`` itself.
After: it is a copy, as without autocast, and the output is known to be fp16. Also finds ``h.float()``, which without
autocast is ``h`` itself but under autocast has its own storage, so that writes to one would not reach the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.passes.graph.activation_checkpoints import is_checkpoint
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.fake_values import adopt_values, tensors, value
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.op_args.dropout_args import given_back
from amp_graph.passes.torch_compat.dynamo_patches import reads_of_dtype
from amp_graph.passes.torch_compat.storage import storage_key

METHODS = {"bfloat16": torch.bfloat16, "half": torch.float16}
WIDENING = frozenset({"float", "to", "type", "type_as"})  # methods that return their fp32 operand itself


@dataclass(frozen=True)
class Conversions:
    """The outputs of a graph that depend on the user's conversions.

    low: positions of the outputs that are low precision without autocast too, each with the inputs that must be low.
    apart: pairs of outputs, or of an input (a negative number: -1 is the first) and an output, that share storage
    without autocast.
    """

    low: dict[int, frozenset[int]]
    apart: tuple[tuple[int, int], ...]


def conversions(gm: GraphModule, dtype: torch.dtype) -> Conversions:
    """Make ``h.half()`` copy in ``gm``, captured under autocast to ``dtype``; return the conversions of ``gm``.

    ``x.to(dtype)`` does not count behind code that read the dtype of a value that autocast lowered: Dynamo records
    ``x.to(y.dtype)`` the same way.
    """
    adopt_values(gm)
    given = {node: frozenset([i]) for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    low = _low_by_user(gm, dtype, given, [])
    for node in gm.graph.find_nodes(op="call_method", target=next(n for n, d in METHODS.items() if d is dtype)):
        source = node.args[0]
        if isinstance(source, Node) and _is_low(source, dtype) and low.get(source) != frozenset():
            node.target, node.args, node.kwargs = "to", (source, dtype), {**node.kwargs, "copy": True}
    leaves = tree_leaves(gm.graph.output_node().args)
    found = {i: low[leaf] for i, leaf in enumerate(leaves) if isinstance(leaf, Node) and leaf in low}
    return Conversions(found, tuple(_apart(gm, leaves, dtype, low)))


Low = dict[Node, frozenset[int]]  # nodes, each with the inputs of the graph that must be low for it to be low


def _low_by_user(gm: GraphModule, dtype: torch.dtype, given: Low, read: list[frozenset[int] | None]) -> Low:
    """Return the nodes that are low without autocast, among them the ``given`` inputs.

    ``read``: of the low values whose dtype the code has read, the same, or None for one that autocast lowered.
    """
    found = {node: inputs for node, inputs in given.items() if _is_low(node, dtype)}
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method") and _is_low(node, dtype):
            operands = [n for n in node.all_input_nodes if any(t.is_floating_point() for t in tensors(value(n)))]
            if node.op == "call_method" and METHODS.get(str(node.target)) is dtype:
                found[node] = frozenset()
            elif node.op == "call_method" and dtype in (*node.args, *node.kwargs.values()):
                if None not in read:
                    found[node] = frozenset().union(*filter(None, read))
            elif is_part(node) and is_checkpoint(node.args[0]):
                found |= _low_results(gm, node, dtype, found, read)
            elif operands and all(n in found for n in operands):
                found[node] = frozenset().union(*(found[n] for n in operands))
        if reads_of_dtype(node) and _is_low(node, dtype):
            read.append(found.get(node))
    return found


def _low_results(gm: GraphModule, part: Node, dtype: torch.dtype, low: Low, read: list[frozenset[int] | None]) -> Low:
    """Return ``part``, the result of a checkpoint, if the body of that returns it low without autocast."""
    checkpoint: Any = part.args[0]
    body = graph_read(gm, checkpoint.args[0])
    assert body is not None, "a checkpoint has a body"
    adopt_values(body)
    inputs = zip(body.graph.find_nodes(op="placeholder"), checkpoint.args[1:], strict=True)
    inside = _low_by_user(body, dtype, {node: low[source] for node, source in inputs if source in low}, read)
    result = body.graph.output_node().args[0][part.args[1]]
    return {part: inside[result]} if result in inside else {}


def _apart(
    gm: GraphModule, leaves: list[object], dtype: torch.dtype, low: dict[Node, frozenset[int]]
) -> list[tuple[int, int]]:
    """Return the pairs of ``Conversions.apart``."""
    places: dict[int | None, int] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        places |= dict.fromkeys(_memories(node), -1 - i)
    made: dict[int | None, list[int]] = {}
    for i, leaf in enumerate(leaves):
        for key in _memories(leaf):
            made.setdefault(key, []).append(i)
            places.setdefault(key, i)
    pairs = []
    for node in gm.graph.nodes:
        source = node.args[0] if node.op == "call_method" and node.target in WIDENING and node.args else None
        if not isinstance(source, Node) or not _is_low(source, dtype) or low.get(source) == frozenset():
            continue
        if isinstance(value(node), torch.Tensor) and value(node).dtype == torch.float32:
            where = next((places[key] for key in _memories(source) if key in places), None)
            pairs += [(where, i) for key in _memories(node) for i in made.get(key, ()) if where is not None]
    return pairs


def _memories(node: object) -> list[int | None]:
    """Return the storages of a value; looks through no-op dropouts, which return their input but whose fake copies."""
    while isinstance(node, Node) and (source := given_back(node)) is not None:
        node = source
    return [storage_key(t) for t in tensors(value(node))] if isinstance(node, Node) else []


def _is_low(node: Node, dtype: torch.dtype) -> bool:
    return any(t.dtype == dtype for t in tensors(value(node)))
