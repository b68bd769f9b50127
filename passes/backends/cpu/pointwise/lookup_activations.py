"""Compute bf16 activations on the CPU with lookup tables, where those are faster.

Before: ``gelu(x, approximate="tanh")``.
After: ``gelu_by_table(x, approximate="tanh")``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.pointwise import lookup_table
from amp_graph.passes.backends.cpu.pointwise.lookup_table_recompute import tabled_computed_again
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION, TRANSFORM
from amp_graph.passes.graph.node_info import calls_torch
from amp_graph.passes.profitability.thresholds import table_is_profitable
from amp_graph.passes.registry import Recomputable, declare

TABLED: dict[tuple[str, ...], Callable[..., Any]] = {
    ("aten.gelu",): lookup_table.gelu_by_table,
    ("aten.silu",): lookup_table.silu_by_table,
    ("aten.mish",): lookup_table.mish_by_table,
}


@dataclass(frozen=True)
class LookupActivations(Pass):
    """Replaces ``gelu``, ``silu`` and ``mish`` with lookups in tables, when it is profitable.

    Law: bf16 CPU tensors, torch's functions, called directly and not in place. Exactness: forward bit-exact, and
    gradients of GELUs; of others rounding-equal: fp32 products in another order, rounded once. GELUs of channels_last
    images are rounding-equal: torch's own differ from those of contiguous ones.
    """

    name: ClassVar[str] = "lookup-activations"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every activation."""
        changes = []
        for node in gm.graph.nodes:
            if names_of(node) in TABLED and calls_torch(node) and _fits(node) and lookup_table.library() is not None:
                node.target = TABLED[names_of(node)]
                changes.append(Change(self.name, "by a table", node.name, f"as torch computes {form_of(node)}"))
        return PassResult(gm, tuple(changes))


def form_of(node: Node) -> str:
    """Return the name of an activation in ``by_table.FORMS``."""
    (name,) = names_of(node)
    return "gelu by tanh" if "tanh" in (*node.args[1:], *node.kwargs.values()) else name.removeprefix("aten.")


def _fits(node: Node) -> bool:
    if node.op != "call_function" or not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return False
    made, given = value(node), [value(n) for n in node.all_input_nodes]
    if len(given) != 1 or any(not isinstance(t, torch.Tensor) or t.dtype != torch.bfloat16 for t in (made, *given)):
        return False
    return table_is_profitable(made.device.type, form_of(node), made.numel())


def _name_the_form(node: Node) -> None:
    node.args, node.kwargs = (node.args[0], form_of(node)), {}


for _function in TABLED.values():
    declare(
        _function,
        recomputable=Recomputable(replacement=tabled_computed_again, rewrite=_name_the_form, cost="looked up"),
    )
