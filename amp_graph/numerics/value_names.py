"""Finds in the graph of a whole step the values of its forward, and their gradients, by tracing it once more.

Before: ``addmm_3`` and ``mm_7``, without modules. After: ``addmm_3`` is the value of ``blocks.0.fc/linear``, and
``mm_7`` its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST, MARK
from amp_graph.passes.graph.node_info import is_view, module_path, source_line
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.dynamo_capture import one_capture_at_a_time
from amp_graph.passes.torch_compat.fake import traced_as
from amp_graph.step.step_graph import StepGraph, trace_joint
from amp_graph.step.traced_step import CapturedStep


@dataclass(frozen=True)
class ValueName:
    """A value of the forward, or its gradient: ``module/operation``, and the user's line."""

    name: str
    gradient: bool
    line: str


class _Values(torch.fx.Interpreter):
    """Runs a rewritten forward in a trace, and notes as what its values and their gradients are traced."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.found: dict[str, ValueName] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        planned = n.op in ("call_function", "call_method") and MARK in n.meta and CAST not in n.meta
        if planned and isinstance(result, Tensor) and result.is_floating_point():
            self._note(result, n, gradient=False)
            if result.requires_grad:
                result.register_hook(lambda grad: self._note(grad, n, gradient=True))
        return result

    def _note(self, tensor: Tensor, node: Node, gradient: bool) -> None:
        traced = traced_as(tensor)
        while traced is not None and _is_view(traced) and _whole(traced):
            traced = traced.all_input_nodes[0]  # the linear of a batch of sequences is a view of a matrix product
        if traced is not None and traced.op == "call_function" and not _is_view(traced):
            name = f"{module_path(node) or '(root)'}/{node.name}"
            self.found.setdefault(traced.name, ValueName(name, gradient, source_line(node)))


def values_of(captured: CapturedStep, graph: StepGraph, args: Sequence[Any]) -> dict[str, ValueName]:
    """Return the named values of ``graph``, by node; traces its forward and backward once more, on fake tensors."""
    assert graph.parts is not None, "of a traced step"
    values = _Values(captured.rewritten.gm)
    with one_capture_at_a_time():
        traced = trace_joint(replace(graph.parts, forward=values.run, args=args))
    targets = {n.name: n.target for n in traced.graph.nodes if n.op == "call_function"}
    here = {n.name: n.target for n in graph.gm.graph.nodes if n.op == "call_function"}
    # A pass may have replaced a node by another of the same name.
    return {name: told for name, told in values.found.items() if here.get(name) == targets[name]}


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and is_view(node.target)


def _whole(view: Node) -> bool:
    """Say whether a view has all elements of its source, once each."""
    source, own = value(view.all_input_nodes[0]), value(view)
    return isinstance(source, Tensor) and isinstance(own, Tensor) and source.numel() == own.numel()
