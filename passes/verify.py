"""Check that a graph keeps the contract of ``passes.base.Pass``.

Before: a graph that a pass returned. After: the same graph, or a ``VerifyError`` that names node and clause.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Pass, VerifyError, Writes
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import fake_mode_of, run_node, tensors, value
from amp_graph.passes.graph.graph_text import target_text, type_text
from amp_graph.passes.graph.identify_ops import Operation, identify, is_part, is_tensor_call, operations_of
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.meta_keys import IDENTITY, REGION
from amp_graph.passes.precision.classify import is_conversion_target
from amp_graph.passes.precision.plan_precision import refuse_mixed
from amp_graph.passes.registry import is_own
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA, FakeTensorMode, is_number, same


@dataclass(frozen=True)
class Contract:
    """What must be the same before and after a pass."""

    inputs: tuple[str, ...]
    outputs: tuple[torch.dtype, ...]
    parameters: tuple[tuple[str, int, bool], ...]
    effects: tuple[str, ...]
    without_value: frozenset[str] = frozenset()  # nodes without ``meta["val"]``

    @staticmethod
    def of(gm: GraphModule, writes: Writes = Writes.KEPT) -> Contract:
        """Read the contract of a graph; with ``OWN`` writes, it omits writes to memory that the graph allocated."""
        nodes = list(gm.graph.nodes)
        returned = node_info.nodes_inside(gm.graph.output_node().args)
        outputs = [t.dtype for s in returned for t in tensors(value(s))]
        parameters = tuple((name, id(p), p.requires_grad) for name, p in gm.named_parameters(remove_duplicate=False))
        inputs = tuple(n.name for n in nodes if n.op == "placeholder")
        mode = fake_mode_of(gm)
        lives = Lifetimes.of(gm) if writes is Writes.OWN else None
        held = [n for n in nodes if lives is None or _outlives(n, lives)]
        parts = [part for node in held for part in _operations(node, mode)] if mode else []
        effects = tuple(  # random draws, and writes to memory, in order
            str(part.op) for part in parts if node_info.draws(part.op, part.arguments) or node_info.is_mutable(part.op)
        )
        return Contract(inputs, tuple(outputs), parameters, effects, frozenset(n.name for n in _without_value(gm)))


# The state of a node when it was checked: target, arguments, metadata, and values of its inputs.
Checked = dict[Node, tuple[Any, ...]]


def verify(gm: GraphModule, before: Contract, by: Pass | None = None, checked: Checked | None = None) -> Contract:
    """Return the contract of ``gm``; raise VerifyError if it breaks ``before``, the contract before the pass.

    ``by``: the pass that ran, which may declare exceptions. ``checked``: nodes that earlier calls verified; unchanged
    ones are not run again, and this call adds to it.
    """
    gm.graph.lint()
    _refuse_without_value(gm, before)
    writes = by.writes if by is not None else Writes.KEPT
    after = Contract.of(gm, writes)
    adds = by is not None and by.adds_inputs
    _same("inputs", before.inputs, after.inputs[: len(before.inputs)] if adds else after.inputs)
    _same("parameters", before.parameters, after.parameters)
    absorbed = writes is Writes.ABSORBED
    known = _without_removed(before.effects, after.effects) if absorbed else before.effects
    now = after.effects[: len(known)] if writes is Writes.APPENDED else after.effects
    _same("random draws, writes, or their order", known, now)
    if by is None or not by.changes_outputs:
        _same("output dtypes", before.outputs, after.outputs)
    mode = fake_mode_of(gm)
    checked = {} if checked is None else checked
    for node in gm.graph.nodes:
        if mode is not None and not _is_as_checked(node, checked):
            if _is_checked(node, mode):
                _check_value(node, mode)
            checked[node] = _state(node)
    return after


def _without_value(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output") and "val" not in n.meta]


def _refuse_without_value(gm: GraphModule, before: Contract) -> None:
    """Raise VerifyError for a node whose value the pass did not set, instead of for its reader."""
    for node in _without_value(gm):
        if node.users and node.name not in before.without_value:
            readers = ", ".join(reader.name for reader in node.users)
            said = (
                f"the pass wrote it without a value, node.meta['val'], which {readers} reads\n"
                "  legal: every new node that is read says what it computes, as fake tensors\n"
                "  fix:   set_value(node, run_node(node, fake_mode_of(gm))) of amp_graph.passes.graph.edit"
            )
            raise VerifyError(_message(node, said))


def _state(node: Node) -> tuple[Any, ...]:
    told = [node.meta.get(IDENTITY), *(value(s) for s in (*node.all_input_nodes, node))]
    given = repr((node.args, node.kwargs))  # 1 and 1.0 are equal, and lead to other dtypes
    return node.target, given, REGION in node.meta, is_part(node), told


def _is_as_checked(node: Node, checked: Checked) -> bool:
    if node not in checked:
        return False
    (*now, values), (*then, known) = _state(node), checked[node]
    return now == then and all(map(operator.is_, values, known))


def _same(what: str, before: Any, after: Any) -> None:
    if before != after:
        raise VerifyError(f"verify: the pass changed the graph's {what}: before {before}, after {after}")


def _without_removed(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``before`` without the in-place sums and relus that are not in ``after``."""
    kept, rest = [], list(after)
    for effect in before:
        if rest and rest[0] == effect:
            kept.append(rest.pop(0))
        elif not effect.startswith(("aten.relu_", "aten.add_")):
            kept.append(effect)
    return tuple(kept)


def _outlives(node: Node, lives: Lifetimes) -> bool:
    """Say whether ``node`` has effects outside of the graph: it draws, or writes to an input."""
    if isinstance(node.target, OpOverload) and node_info.is_random(node.target):
        return True
    written = lives.memory_written_by(node)
    return not written or any(root.op != "call_function" for root in written)


def _operations(node: Node, mode: FakeTensorMode) -> tuple[Operation, ...]:
    """Return the operations of a node, identifying it if needed; for our own functions only those that draw."""
    ours = is_own(node.target)
    if not is_tensor_call(node):
        return ()
    known = operations_of(node) if ours or IDENTITY in node.meta else identify(node, mode)
    found = () if isinstance(known, str) else known
    return tuple(o for o in found if node_info.draws(o.op, o.arguments)) if ours else found


def _is_checked(node: Node, mode: FakeTensorMode) -> bool:
    if node.op not in ("call_function", "call_method") or not tensors(value(node)) or node_info.is_higher_order(node):
        return False
    if REGION in node.meta or is_part(node) or is_own(node.target):
        return False
    # In-place reshapes and data-dependent shapes cannot be recomputed; a region's autocast is not active here.
    operations = _operations(node, mode)
    known = bool(operations) or is_conversion_target(node)
    return known and not any(node_info.cannot_run_again(o.op) for o in operations)


def _check_value(node: Node, mode: Any) -> None:
    stored = value(node)
    try:
        refuse_mixed(node)
        fresh = run_node(node, mode)
    except DEPENDS_ON_DATA:
        return
    except Exception as error:
        raise VerifyError(_message(node, f"cannot run on its inputs: {error}")) from error
    told, found = tensors(stored), tensors(fresh)
    if len(told) != len(found) or not all(map(_alike, told, found)):
        raise VerifyError(_message(node, f"its metadata says {type_text(stored)}, it computes {type_text(fresh)}"))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare dtypes and sizes.

    Two symbols are not compared, which would add a guard. A symbol is a number's equal if the capture fixed it to that.
    """
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    sizes = zip(one.shape, other.shape, strict=True)
    return all(same(a, b) if is_number(a) or is_number(b) else True for a, b in sizes)


def _message(node: Node, what: str) -> str:
    inputs = ", ".join(type_text(value(s)) for s in node.all_input_nodes)
    return f"verify: {node.name} = {target_text(node)}({inputs}): {what}{node_info.at_line(node)}"
