"""Let convolutions with a kernel of one place be matrix products, where those are faster.

Before: ``conv2d(x, w)``, ``w`` [out, in, 1, 1], on channels_last images. After: ``pointwise_conv(x, w)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.conv_as_product import pointwise_conv
from amp_graph.passes.identify_ops import OPS, names_of, operation_of, tensor_inputs
from amp_graph.passes.image_layout import is_channels_last, is_image
from amp_graph.passes.node_value import fake_mode_of, value
from amp_graph.passes.regions import REGION, is_trained
from amp_graph.passes.torch_private import FakeTensorMode, concrete_size
from amp_graph.passes.what_pays import FEW_PLACES, pointwise_product_pays


@dataclass(frozen=True)
class PointwiseConv(Pass):
    """Replaces ``conv2d(x, w)`` with ``pointwise_conv(x, w)`` when ``w`` is 1 x 1 and ``what_pays`` says so.

    Law: no padding, dilation or groups, any stride, and ``x`` channels_last, so that its places are rows as they lie.
    Exactness: rounding-equal; sums are fp32 in another order.
    """

    name: ClassVar[str] = "pointwise-conv"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution."""
        mode = fake_mode_of(gm)
        changes, skips = [], []
        for node in gm.graph.nodes:
            given = _arguments(node, mode) if mode is not None else None
            if given is None:
                continue
            out = value(node)
            places = math.prod(concrete_size(out.shape[d]) for d in (0, 2, 3))
            trains = is_trained(node) and is_trained(given["weight"])
            if not pointwise_product_pays(out.device.type, out.dtype, places, trains):
                skips.append(Skip(node.name, f"torch's is as fast for {places} places in {out.dtype}"))
                continue
            few = places <= FEW_PLACES
            node.op, node.target, node.kwargs = "call_function", pointwise_conv, {}
            node.args = (given["input"], given["weight"], given["bias"], given["stride"], few)
            what = "a product forward and backward" if few else "a product for the weight's gradient"
            changes.append(Change(self.name, "as a product", node.name, f"{places} places: {what}"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _arguments(node: Node, mode: FakeTensorMode) -> dict[str, Any] | None:
    """Return the arguments of a 1 x 1 convolution of rows that lie in order, by the operator's names."""
    if node.op != "call_function" or node.target is pointwise_conv or names_of(node) != ("aten.conv2d",):
        return None
    (known, *more), tensors = node.meta[OPS].operations, tensor_inputs(node)
    found = {name: [tensors[i] for i in known.operands(name)] for name in ("input", "weight", "bias")}
    if more or REGION in node.meta or len(found["input"]) != 1 or len(found["weight"]) != 1:
        return None
    (x,), (weight,), bias = found["input"], found["weight"], next(iter(found["bias"]), None)
    if tuple(concrete_size(n) for n in value(weight).shape[2:]) != (1, 1) or not _lies_in_rows(value(x)):
        return None
    call = operation_of(node, mode)
    if call is None or not _is_plain(call.arguments):
        return None
    return {"input": x, "weight": weight, "bias": bias, "stride": _pair(call.arguments["stride"])}


def _is_plain(given: dict[str, Any]) -> bool:
    padding = given["padding"]
    unpadded = padding in ("same", "valid") if isinstance(padding, str) else not any(padding)
    return unpadded and given["groups"] == 1


def _pair(stride: Any) -> tuple[int, int]:
    first, last = stride[0], stride[-1]
    return int(first), int(last)


def _lies_in_rows(x: torch.Tensor) -> bool:
    """Say whether an image's channels lie innermost, densely: as they do, too, where there is but one place."""
    if x.dim() != 4:
        return False
    return is_channels_last(x) if is_image(x) else x.is_contiguous() and concrete_size(x.shape[1]) > 1
