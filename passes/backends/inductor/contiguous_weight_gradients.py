"""Give the gradients of convolution weights their parameters' layout, in flat graphs of whole steps for Inductor.

Before: an update that reads a channels_last gradient together with a contiguous weight and its moments, with strided
accesses.
After: ``amp_graph::in_rows(gradient)``, one copy, and an update with contiguous accesses.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.torch_compat.symbolic_sizes import is_contiguous, same

ATEN: Any = torch.ops.aten
STEPS = 16  # operations between a gradient and its update: unscaling, clipping, decay


def in_rows(x: Tensor) -> Tensor:
    """Return a contiguous copy of ``x``."""
    return x.clone(memory_format=torch.contiguous_format)


define_as_typed(in_rows, lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))


@dataclass(frozen=True)
class MakeWeightGradientsContiguous(Pass):
    """Copies a convolution's weight gradient whose layout differs from that of the tensors it is combined with.

    Law: on the CPU, 4 dimensions, and one of the next operations reads a contiguous graph input of the same shape.
    Inductor's tiles of 3 x 3 filters leave 7 of 16 lanes empty and are transposed several times: 34 ms of a U-Net's
    step of 227, where such copies take 8 and a contiguous update 11. Exactness: bit-exact.
    """

    name: ClassVar[str] = "make-weight-gradients-contiguous"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution's backward."""
        changes = []
        for node in list(gm.graph.find_nodes(op="call_function", target=operator.getitem)):
            source, index = node.args
            made = isinstance(source, Node) and source.target is ATEN.convolution_backward.default and index == 1
            if not made or not _lies_across(node) or not _meets_rows(node):
                continue
            if any(user.target is OPS.in_rows.default for user in node.users):
                continue
            with gm.graph.inserting_after(node):
                laid = gm.graph.call_function(OPS.in_rows.default, (node,))
            for user in [u for u in node.users if u is not laid]:
                user.replace_input_with(node, laid)
            laid.meta = {**node.meta, "val": value(node).new_empty(value(node).shape)}
            changes.append(Change(self.name, "made contiguous", node.name, "its parameter is contiguous"))
        return PassResult(gm, tuple(changes))


def _lies_across(node: Node) -> bool:
    found = value(node)
    if not isinstance(found, Tensor) or found.dim() != 4 or found.device.type != "cpu":
        return False
    return not is_contiguous(found)


def _meets_rows(gradient: Node) -> bool:
    """Say whether a contiguous graph input of the shape of ``gradient`` is soon read together with it."""
    shape, reached = value(gradient).shape, {gradient}
    for _ in range(STEPS):
        readers = {user for node in reached for user in node.users}
        for other in (source for reader in readers for source in reader.all_input_nodes):
            found = value(other)
            if (
                other.op == "placeholder"
                and isinstance(found, Tensor)
                and same(found.shape, shape)
                and is_contiguous(found)
            ):
                return True
        alike = {r for r in readers if isinstance(value(r), Tensor) and same(value(r).shape, shape)}
        if alike <= reached:
            return False
        reached |= alike
    return False
