"""Check that a graph keeps the contract of ``passes.base.Pass``.

Before: a graph that a pass returned. After: the same graph, or a ``VerifyError`` that names node and clause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes import facts
from amp_graph.passes.base import VerifyError
from amp_graph.passes.classify import is_conversion_target
from amp_graph.passes.identify_ops import OPS, Identity, is_part
from amp_graph.passes.node_value import captured, fake_mode_of, run_node, tensors, value
from amp_graph.passes.text import target_text, type_text


@dataclass(frozen=True)
class Contract:
    """What must be the same before and after a pass."""

    inputs: tuple[str, ...]
    outputs: tuple[torch.dtype, ...]
    parameters: tuple[tuple[str, int, bool], ...]
    effects: tuple[str, ...]

    @staticmethod
    def of(gm: GraphModule) -> Contract:
        """Read the contract off a graph."""
        nodes = list(gm.graph.nodes)
        outputs = [t.dtype for n in nodes if n.op == "output" for s in _leaves(n) for t in tensors(value(s))]
        parameters = tuple((name, id(p), p.requires_grad) for name, p in gm.named_parameters(remove_duplicate=False))
        inputs = tuple(n.name for n in nodes if n.op == "placeholder")
        return Contract(inputs, tuple(outputs), parameters, tuple(_effects(nodes)))


def verify(gm: GraphModule, before: Contract, *, changes_outputs: bool = False) -> None:
    """Raise VerifyError where ``gm`` breaks the contract that ``before`` was read from."""
    gm.graph.lint()
    after = Contract.of(gm)
    _same("inputs", before.inputs, after.inputs)
    _same("parameters", before.parameters, after.parameters)
    _same("random draws, writes, or their order", before.effects, after.effects)
    if not changes_outputs:
        _same("output dtypes", before.outputs, after.outputs)
    mode = fake_mode_of(gm)
    for node in gm.graph.nodes:
        if mode is not None and _is_checked(node):
            _check_value(node, mode)


def _same(what: str, before: Any, after: Any) -> None:
    if before != after:
        raise VerifyError(f"verify: the pass changed the graph's {what}: before {before}, after {after}")


def _leaves(output: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(output.args, found.append)
    return found


def _effects(nodes: list[Node]) -> list[str]:
    """List what draws random numbers or writes to memory, in order."""
    found = []
    for node in nodes:
        identity = node.meta.get(OPS)
        if isinstance(identity, Identity):
            for part in identity.operations:
                if facts.is_random(part.op) or facts.is_mutable(part.op):
                    found.append(str(part.op))
    return found


def _is_checked(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or not tensors(value(node)) or facts.is_higher_order(node):
        return False
    identity = node.meta.get(OPS)
    if is_part(node) or not isinstance(identity, Identity):
        return is_conversion_target(node)
    # What reshapes in place or depends on data has no second answer; a region's autocast is not active here.
    return "amp_region" not in node.meta and not any(
        facts.reshapes_in_place(o.op) or facts.changes_shape_by_data(o.op) for o in identity.operations
    )


def _check_value(node: Node, mode: Any) -> None:
    stored = value(node)
    try:
        fresh = run_node(node, mode)
    except Exception as error:
        raise VerifyError(_told(node, f"cannot run on its inputs: {error}")) from error
    if [(t.dtype, len(t.shape)) for t in tensors(fresh)] != [(t.dtype, len(t.shape)) for t in tensors(stored)]:
        raise VerifyError(_told(node, f"its metadata says {type_text(stored)}, it computes {type_text(fresh)}"))


def _told(node: Node, what: str) -> str:
    where = facts.source_line(node)
    inputs = ", ".join(type_text(value(s)) for s in node.all_input_nodes)
    return f"verify: {node.name} = {target_text(node)}({inputs}): {what}" + (f"\n  at {where}" if where else "")


def captured_outputs(gm: GraphModule) -> tuple[torch.dtype, ...]:
    """Return the output dtypes that the graph was captured with."""
    return tuple(t.dtype for n in _leaves(gm.graph.output_node()) for t in tensors(captured(n)))
