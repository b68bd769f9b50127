"""Upcast the half-precision operands of a user to which ``torch.autocast`` gives another dtype.

Before: ``linear(x: f16, w: f32)``, which runs under autocast only. After: ``linear(x.float(), w) -> f32``, which runs
in fp32 and can be planned. Under a list of autocast's own: ``mse_loss(x: f16, y: f16)``, which that list upcasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass, OpList
from amp_graph.passes.base import Change, Pass
from amp_graph.passes.casts.portable_ops import float_operands, put_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.edit import give_value, recompute
from amp_graph.passes.graph.fake_values import fake_mode_of, tensors, value
from amp_graph.passes.graph.identify_ops import Operation, identify, is_part, is_tensor_call, taken_apart
from amp_graph.passes.graph.meta_keys import INSIDE, REGION, WIDENED
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.graph.trace_node import DECOMPOSITIONS
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.torch_compat.fake import FakeTensorMode


@dataclass(frozen=True)
class WidenHalves(Pass):
    """Replaces ``f(x)`` with ``f(x.float())`` for a half ``x`` if autocast has a rule for ``f`` and ``f`` gives fp32.

    That is where fp32 operands meet half ones. Values behind it are fp32 then, where the fake of a product has the
    dtype of its first operand. A list of autocast's own also gives ``f`` fp32 where all operands are half; outputs that
    had a half dtype then get it back with ``keep_outputs``. Exactness: bit-exact, as fp32 holds each half value.
    """

    options: PipelineOptions
    required: ClassVar[bool] = True

    @property
    def changes_outputs(self) -> bool:
        """A product that has the dtype of its half operand at capture is fp32."""
        return True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every node; recompute the values behind a widened one."""
        mode = fake_mode_of(gm)
        if mode is None or not any(t.dtype in HALVES for n in gm.graph.nodes for t in tensors(value(n))):
            return
        captured: dict[Node, torch.dtype] = {}  # of the values that are fp32 now
        restored: set[Node] = set()  # those that ran in half precision as captured
        lists = self.options.lists
        for node in list(gm.graph.nodes):
            narrowed = [source for source in node.all_input_nodes if source in captured]
            if is_tensor_call(node):
                beside = torch.float32 in _dtypes(node)
                halves = _to_widen(node, mode, lists)
                for source in halves:
                    node.replace_input_with(source, put_cast(node, source, torch.float32, mode))
                    gm.meta[WIDENED] = True
                    yield Change(self.name, "widened", source.name, f"{node.name} reads it beside fp32")
                before = recompute(node, mode) if halves or narrowed else None
                if isinstance(before, torch.Tensor) and before.dtype != value(node).dtype:
                    captured[node] = before.dtype
                if self.options.keep_outputs and node in captured and (not beside or restored.intersection(narrowed)):
                    restored.add(node)
            elif is_part(node) and narrowed:
                give_value(node, value(narrowed[0])[node.args[1]])
            else:
                for source in narrowed:
                    # A product beside fp32 only runs widened; the operator around a body knows its captured dtypes.
                    if node.op == "output" and INSIDE not in gm.meta and source not in restored:
                        continue
                    node.replace_input_with(source, put_cast(node, source, captured[source], mode))


def _to_widen(node: Node, mode: FakeTensorMode, lists: OpList) -> list[Node]:
    """Return the half operands of ``node`` that autocast would cast, beside fp32 ones or for an fp32 result."""
    halves = [n for n in node.all_input_nodes if any(t.dtype in HALVES for t in tensors(value(n)))]
    if not halves or REGION in node.meta or not all(isinstance(value(n), torch.Tensor) for n in halves):
        return []
    if torch.float32 not in _dtypes(node):
        return halves if lists.unlisted == "native" and _is_upcast(node, mode, lists) else []
    kinds = {t.device.type for t in tensors(value(node))}
    return halves if any(_meets_a_rule(node, mode, kind) for kind in kinds) else []


def _dtypes(node: Node) -> set[torch.dtype]:
    return {t.dtype for t in (*float_operands(node), *tensors(value(node)))}


def _is_upcast(node: Node, mode: FakeTensorMode, lists: OpList) -> bool:
    """Say whether ``lists`` upcasts the operands of all operations of ``node`` that compute, half ones as well."""
    found = identify(node, mode)
    if isinstance(found, str):
        return False
    # The schema of ``broadcast_tensors``, which losses call, does not say that it returns views.
    computed = [o for o in found if not node_info.is_view(o.op) and o.packet != "aten.broadcast_tensors"]
    rules = [lists.lookup(o.op, o.arguments) for o in computed]
    return bool(rules) and all(rule is not None and rule.cls is OpClass.DENY for rule in rules)


def _meets_a_rule(node: Node, mode: FakeTensorMode, device: str) -> bool:
    """Say whether autocast has a rule for ``node`` or for an operation in its decomposition; True if unknown.

    It has no rule for ``einsum`` on the CPU, but has one for the ``bmm`` inside.
    """

    def has_rule(o: Operation) -> bool:
        return node_info.autocast_has_rule(o.op, device)

    def is_composite(o: Operation) -> bool:
        composite = node_info.is_composite(o.op) or o.op in DECOMPOSITIONS
        return composite and not node_info.is_view(o.op) and not has_rule(o)

    found, _ = taken_apart(node, mode, is_composite)
    return isinstance(found, str) or any(map(has_rule, found))
