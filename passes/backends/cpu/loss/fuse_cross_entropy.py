"""Compute a language model's loss from the low-precision logits of its last linear, a few rows at a time.

Before: ``logits = linear(h, w).float(); loss = cross_entropy(logits.view(-1, V), labels)``.
After: ``loss = cross_entropy_low(linear(h, w), labels)``, and ``loss, logits = cross_entropy_and_logits(...)`` where
the logits are returned too.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low
from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import give_value, take_over
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, IDENTITY, REGION, TRANSFORM
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size

OPTIONS = ("target", "ignore_index", "reduction")
REDUCTIONS = ("none", "mean", "sum")
# Operations that keep all rows, in order.
RESHAPES = frozenset({"aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.contiguous"})


class Logits(NamedTuple):
    """What a loss reads: logits in low precision, the cast that widens them, and what reshapes it, from the cast on."""

    low: Node
    cast: Node
    path: tuple[Node, ...]


@dataclass(frozen=True)
class FuseCrossEntropy(NodePass):
    """Replaces ``cross_entropy(logits.float(), labels)`` with ``cross_entropy_low(logits, labels)`` when it trains.

    The logits stay whole, in low precision: recomputing them in backward, or multiplying by chunks of tokens, which
    sums the weight's gradient chunk by chunk, took longer than what it saves. Law: labels are class indices, with any
    ignore_index and reduction, without class weights and label smoothing. Logits with other readers are upcast for
    those; their gradients are added in fp32. Exactness: rounding-equal; the loss is summed in another order, and the
    gradient of the logits is fp32, rounded once, as that of ``float()`` is.
    """

    options: PipelineOptions

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Replace a cross entropy that trains on upcast logits."""
        given = _arguments(node)
        found = _logits(given["self"]) if given is not None else None
        if given is None or found is None:
            return None
        memory = observe(gm, marks(gm))
        reason = _why_not(node, given, found, memory, self.options.planned_for)
        if reason:
            return Skip(node.name, reason)
        rows = math.prod(concrete_size(n) for n in value(found.low).shape[:-1])
        told = f"{rows} x {concrete_size(value(found.low).shape[-1])} logits"
        _rewrite(gm, node, given, found)
        return Change(self.name, "in parts", node.name, f"no fp32 copies of {told} for the loss")


def _arguments(node: Node) -> dict[str, Any] | None:
    """Return the arguments of a cross entropy that trains, by the names of the operator."""
    if node.op != "call_function" or names_of(node) != ("aten.cross_entropy_loss",) or not is_trained(node):
        return None
    given = arguments_of(node)
    return None if given is None else given | {"reduction": REDUCTIONS[given["reduction"]]}


def _logits(node: Node) -> Logits | None:
    """Follow what a loss reads back to the cast that upcasts it; None if there is none."""
    path: list[Node] = []
    while not _widens(node):
        if not names_of(node) or not RESHAPES.issuperset(names_of(node)) or not isinstance(node.args[0], Node):
            return None
        path.insert(0, node)
        node = node.args[0]
    return Logits(node.all_input_nodes[0], node, tuple(path))


def _widens(node: Node) -> bool:
    """Say whether ``node`` is a cast from low precision to fp32."""
    if not node.args or not isinstance(node.args[0], Node) or not isinstance(value(node), torch.Tensor):
        return False
    source = value(node.args[0])
    if not isinstance(source, torch.Tensor) or value(node).dtype != torch.float32 or source.dtype.itemsize != 2:
        return False
    return node.op == "call_method" and (CAST in node.meta or node.target in ("float", "to", "type"))


def _why_not(node: Node, given: dict[str, Any], found: Logits, memory: Memory, planned_for: str) -> str:
    """Return why a loss stays as it is, or ""."""
    used = (found.low, found.cast, *found.path, node, given["target"])
    if any(REGION in n.meta or TRANSFORM in n.meta or CHECKPOINT in n.meta for n in (found.cast, *found.path, node)):
        return "inside a region that affects what is computed or saved"
    if any(memory.is_written(n) for n in used):
        return "its logits or labels are written in place"
    low, logits, target = value(found.low), value(given["self"]), value(given["target"])
    if logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return "its labels are not one class index per row"
    if given["weight"] is not None or given["label_smoothing"]:
        return "it has class weights or label smoothing"
    others = _others(node, found)
    if any(memory.order[n] < memory.order[node] for n in others):
        return f"its logits are read before the loss, by {others[0].name}"
    if concrete_size(low.shape[-1]) != concrete_size(logits.shape[1]):
        return "its classes are not the last dimension of the logits"
    device = planned_for if low.device.type == "cpu" else low.device.type
    rows, classes = (concrete_size(n) for n in logits.shape)
    if cross_entropy_in_parts_is_profitable(device, low.dtype, rows, classes):
        return ""
    return f"torch's is as fast for {rows} x {classes} logits in {low.dtype} on {device}"


def _others(node: Node, found: Logits) -> list[Node]:
    """Return the readers of the wide logits' values other than the loss ``node``; readers of sizes do not count."""
    readers = [n for one in (found.cast, *found.path) for n in one.users if n is not node and n not in found.path]
    return [n for n in readers if n.op == "output" or tensors(value(n))]


def _rewrite(gm: GraphModule, node: Node, given: dict[str, Any], found: Logits) -> None:
    """Let the loss read the low-precision logits; other readers of the wide ones get those from the same call."""
    others = _others(node, found)
    for reader in [n for n in found.cast.users if not tensors(value(n)) and n.op != "output"]:
        reader.replace_input_with(found.cast, found.low)
    node.args = (found.low, *(given[name] for name in OPTIONS))
    node.target, node.kwargs = cross_entropy_and_logits if others else cross_entropy_low, {}
    node.meta.pop(IDENTITY, None)
    if others:
        _hand_out(gm, node, found)
    for old in (*reversed(found.path), found.cast):
        if not old.users:
            gm.graph.erase_node(old)


def _hand_out(gm: GraphModule, node: Node, found: Logits) -> None:
    """Give the readers of the loss the first result of ``node``, and those of the wide logits the second."""
    with gm.graph.inserting_before(node.next):
        loss, wide = (gm.graph.call_function(operator.getitem, (node, i)) for i in range(2))
    take_over(loss, node, value(node))
    take_over(wide, found.cast, value(found.cast))
    node.replace_all_uses_with(loss, delete_user_cb=lambda reader: reader not in (loss, wide))
    give_value(node, (value(loss), value(wide)))
    found.cast.replace_all_uses_with(wide)
    before = wide
    for one in found.path:  # other readers of these follow the loss, so these must too
        before.append(one)
        before = one


# Logits from which on their fp32 copies do not fit the caches, and are mapped and paged in again in each call.
FEWEST_LOGITS = 1 << 22


def cross_entropy_in_parts_is_profitable(device: str, dtype: torch.dtype, rows: int, classes: int) -> bool:
    """Say whether a loss over chunks of low-precision logits beats ``cross_entropy(logits.float())``.

    Speedups, bf16 on CPU with dot products, forward and backward of the linear and the loss: 1.13 to 1.42 from 5
    million logits on, 1.09 to 1.19 if the logits are returned too; 1.01 to 1.03 at 4 million, 1.00 to 1.03 at 2
    million; mostly 0.96 to 1.01 at 1 million, which fit the caches.
    Recomputing the logits in backward, and computing them by chunks of tokens, was slower at every size
    (``benchmarks/cross_entropy.py``). AMX was not timed.
    """
    return device == "cpu" and dtype == torch.bfloat16 and rows * classes >= FEWEST_LOGITS and multiplies_bf16()
