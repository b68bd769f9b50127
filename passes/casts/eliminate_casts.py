"""Remove redundant conversions that the user wrote; bit-exact, gradients included.

Before: ``y = x.float(); z = y.bfloat16()`` with ``x`` in bf16. After: ``z`` is ``x``. Before:
``zeros_like(x).float()``. After: ``zeros_like(x, dtype=torch.float32)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.casts.user_copies import is_returned_copy
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.precision.classify import CONVERSIONS, is_conversion_target
from amp_graph.passes.precision.plan_precision import marks

# Operations that make a constant, with the argument position of the fill value; None if the name implies the value.
CREATIONS: dict[str, int | None] = {
    **dict.fromkeys(
        ("aten.zeros", "aten.ones", "aten.zeros_like", "aten.ones_like", "aten.new_zeros", "aten.new_ones")
    ),
    **dict.fromkeys(("aten.full", "aten.full_like"), 1),
    "aten.new_full": 2,
}
READS_A_NUMBER = frozenset({"aten.item", "aten._local_scalar_dense"})


@dataclass(frozen=True)
class EliminateCasts(Pass):
    """Replaces ``x.to(d)``, and ``x.to(wide).to(d)``, with ``x`` when ``x`` is in ``d`` already.

    Law: an upcast and the downcast back change no bit, forward or backward, if nothing else reads the wide value.
    Full -> low -> full stays: it rounds. A constant that both dtypes represent exactly is created in the second one,
    and a number that Python reads from a tensor is the same before and after an upcast. Exactness: bit-exact.
    """

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Walk the graph once, in order."""
        memory = observe(gm, marks(gm))
        for node in list(gm.graph.nodes):
            if not _is_conversion(node):
                continue
            if _create_converted(node):
                yield Change(self.name, "removed", node.name, f"created as {value(node.args[0]).dtype}")
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
                continue
            found = _redundant(node, memory)
            if isinstance(found, str):
                if found:
                    yield Skip(node.name, found)
                continue
            source, reason = found
            node.replace_all_uses_with(source)
            yield Change(self.name, "removed", node.name, reason)
            _erase_unread(gm, node)


def _erase_unread(gm: GraphModule, node: Node) -> None:
    """Erase ``node``, and the upcast before it if nothing else reads that."""
    before = node.args[0]
    gm.graph.erase_node(node)
    if isinstance(before, Node) and not before.users and _is_conversion(before):
        gm.graph.erase_node(before)


def _is_conversion(node: Node) -> bool:
    """Say whether ``node`` converts a tensor's dtype and does nothing else."""
    if CAST in node.meta:
        return isinstance(value(node), torch.Tensor)
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], Node):
        return False
    if not isinstance(value(node), torch.Tensor) or not isinstance(value(node.args[0]), torch.Tensor):
        return False
    if node.kwargs.get("copy") or node.kwargs.get("memory_format") or any(a is True for a in node.args):
        return False
    if value(node).device != value(node.args[0]).device:
        return False
    names = names_of(node)
    return is_conversion_target(node) or (bool(names) and set(names) <= CONVERSIONS)


def _redundant(node: Node, memory: Memory) -> tuple[Node, str] | str:
    """Return the replacement of ``node`` and the reason; else the reason to keep it ("" for a plain cast)."""
    source: Any = node.args[0]
    if memory.is_written(source) or memory.is_written(node):
        return "the storage is written, so the copy is needed: kept"
    if value(source).dtype == value(node).dtype:
        return source, f"already {value(node).dtype}"
    if _is_read_as_a_number(node) and _widens(value(source).dtype, value(node).dtype):
        return source, "the number that is read is the same"
    if not _is_conversion(source):
        return ""
    origin = source.args[0]
    if value(origin).dtype != value(node).dtype or memory.is_written(origin):
        return ""
    if not _widens(value(origin).dtype, value(source).dtype):
        return f"{value(origin).dtype} -> {value(source).dtype} -> back rounds: kept"
    if len(source.users) > 1 and captured(origin).requires_grad:
        return "gradients of several readers are summed in the wide dtype: kept"
    may_be_saved = any(t.requires_grad for reader in node.users for t in tensors(captured(reader)))
    if may_be_saved and _is_callers(origin, memory):
        return "backward would read an input of the caller, who may write to it before: kept"
    if is_returned_copy(node, origin, memory):
        return "the caller gets the copy, and may write to it: kept"
    return origin, f"{value(origin).dtype} -> {value(source).dtype} -> {value(node).dtype} changes no bit"


def _is_callers(node: Node, memory: Memory) -> bool:
    """Say whether ``node`` shares storage with an input that is not a parameter."""
    mine = memory.storages.get(node, frozenset())
    inputs = node.graph.find_nodes(op="placeholder")
    return any(
        mine & memory.storages.get(n, frozenset()) for n in inputs if not isinstance(captured(n), torch.nn.Parameter)
    )


def _create_converted(node: Node) -> bool:
    """Create a constant that only ``node`` reads, and converts, in the dtype of ``node``; say whether that was done."""
    source: Any = node.args[0]
    dtype, names, made = value(node).dtype, names_of(source), value(source)
    if len(names) != 1 or names[0] not in CREATIONS or made.requires_grad or "out" in source.kwargs:
        return False
    if isinstance(source.target, FunctionType):  # a function of torch's Python, a window say, may refuse other dtypes
        return False
    if len(source.users) > 1:  # a write to it, or to a view of it, would be another reader
        return False
    at = CREATIONS[names[0]]
    filled = 0 if at is None else source.args[at] if len(source.args) > at else source.kwargs.get("fill_value")
    if isinstance(filled, bool) or not isinstance(filled, (int, float)):
        return False
    if not all(_holds(filled, d) for d in (made.dtype, dtype)):
        return False
    source.kwargs = {**source.kwargs, "dtype": dtype}  # keyword-only in all of them
    set_value(source, value(node))
    return True


def _holds(number: float, dtype: torch.dtype) -> bool:
    """Say whether ``dtype`` represents ``number`` exactly; False for NaN, whose payload bits may differ."""
    return dtype.is_floating_point and torch.tensor(number, dtype=torch.float64).to(dtype).double().item() == number


def _is_read_as_a_number(node: Node) -> bool:
    """Say whether only Python reads ``node``, as a number."""
    return bool(node.users) and all(set(names_of(user)) <= READS_A_NUMBER and names_of(user) for user in node.users)


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Say whether every value of ``narrow`` is a value of ``wide``: asked of torch.finfo, not of a table."""
    if not (narrow.is_floating_point and wide.is_floating_point):
        return False
    n, w = torch.finfo(narrow), torch.finfo(wide)
    return w.max >= n.max and w.eps <= n.eps and w.smallest_normal <= n.smallest_normal
