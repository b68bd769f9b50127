"""Compute the bias gradient of transposed convolutions as one sum, where the kernel's own is slower.

Before: ``conv_transpose2d(x, w, b, 2)`` in bf16 on CPU.
After: ``conv_transpose_low(x, w, b, (2, 2), ...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.convolution.conv_functions import conv_transpose_low
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.profitability.call_thresholds import transposed_function_is_profitable
from amp_graph.passes.profitability.conv_thresholds import bias_gradient_by_sum_is_profitable
from amp_graph.passes.torch_compat.fake import concrete_size

aten = torch.ops.aten
SCHEMAS = {
    "aten.conv_transpose1d": aten.conv_transpose1d.default,
    "aten.conv_transpose2d": aten.conv_transpose2d.input,
    "aten.conv_transpose3d": aten.conv_transpose3d.input,
}
CALLS = frozenset(
    {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, *SCHEMAS.values()}
    | {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
    | {schema.overloadpacket for schema in SCHEMAS.values()}
)
NUMBERS = ("stride", "padding", "output_padding", "dilation")


@dataclass(frozen=True)
class TransposedConvBiasGradient(Pass):
    """Replaces ``conv_transpose2d``, 1d and 3d, with ``conv_transpose_low`` when it is profitable.

    Law: a bias that trains, batched input, in no region whose precision the user set. Exactness: forward and the
    gradients of input and weight bit-exact; the bias' gradient rounding-equal, with fp32 sums in another order.
    """

    name: ClassVar[str] = "transposed-conv-bias-gradient"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every transposed convolution that trains."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            names = names_of(node)
            if node.op != "call_function" or node.target not in CALLS or len(names) != 1 or names[0] not in SCHEMAS:
                continue
            if REGION in node.meta or not is_trained(node):
                continue
            given = node_info.schema_arguments(SCHEMAS[names[0]], node.args, dict(node.kwargs))
            reason = _why_not(given, concrete_size(value(node).numel()))
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            places = value(given["weight"]).dim() - 2
            stride, padding, output_padding, dilation = (_each(given[name], places) for name in NUMBERS)
            node.target, node.kwargs = conv_transpose_low, {}
            node.args = (given["input"], given["weight"], given["bias"])
            node.args += (stride, padding, output_padding, given["groups"], dilation)
            changes.append(Change(self.name, "bias' gradient", node.name, "a sum is faster than the kernel's own"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _why_not(given: dict[str, Any], elements: int) -> str:
    """Return why a call stays as it is, or ""."""
    x, weight, bias = (given[name] for name in ("input", "weight", "bias"))
    if not isinstance(bias, Node) or not is_trained(bias):
        return "it has no bias with a gradient"
    if not isinstance(x, Node) or not isinstance(weight, Node) or value(x).dim() != value(weight).dim():
        return "its input is not batched"
    device, dtype = value(x).device.type, value(x).dtype
    if not bias_gradient_by_sum_is_profitable(device, dtype):
        return f"the kernel's own sum is as fast in {dtype} on {device}"
    if not transposed_function_is_profitable(elements):
        return f"the call of a function of ours takes longer than the sum of {elements} elements"
    return ""


def _each(given: int | Sequence[int], places: int) -> tuple[int, ...]:
    """Return a number for each of ``places`` dimensions."""
    found = (given,) if isinstance(given, int) else tuple(given)
    return found * places if len(found) == 1 else found
