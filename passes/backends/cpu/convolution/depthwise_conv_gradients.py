"""Compute the gradients of depthwise convolutions with compiled C, where torch's kernel is a plain loop.

Before: ``conv2d(x, w, b, 1, 3, 1, groups)`` with 7 x 7 places, in bf16 on CPU.
After: ``depthwise_low(x, w, b, ...)``; for sequences, ``depthwise_rows(x, w, b, ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.convolution.conv_functions import depthwise_low, depthwise_rows, library
from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.conv_args import ONE, convolution_call, padding_of, pair
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.native.kernel_table import why_missing
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size

SEQUENCES = torch.ops.aten.conv1d.default
CALLS = frozenset({torch.conv1d, torch.nn.functional.conv1d, SEQUENCES, torch.ops.aten.conv1d})
# Kernel side up to which oneDNN JIT-compiles the weight gradient of a depthwise convolution.
MOST_COMPILED = 3
# Kernel size up to which oneDNN JIT-compiles depthwise convolutions of sequences in their own layout. Speedups as ones
# of channels_last images of height 1, bf16 on CPU with dot products, copies included: 5 to 21 for kernel sizes of 15 to
# 128, 0.4 to 0.6 for 4 to 11.
MOST_OF_A_SEQUENCE = 11


@dataclass(frozen=True)
class Depthwise(NodePass):
    """Replaces ``conv2d`` with as many groups as channels with ``depthwise_low`` when it is profitable.

    Also replaces ``conv1d`` with ``depthwise_rows``, even without training. Law: as many output channels, no dilation;
    images are channels_last. Exactness: forward bit-exact, of sequences rounding-equal; gradients rounding-equal, with
    fp32 sums in another order.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Replace a depthwise convolution, of images if it trains."""
        if (found := _of_sequences(node)) is not None:
            node.target, node.args, node.kwargs = depthwise_rows, found, {}
            return Change(self.name, "as an image", node.name, "one place high, for which there are kernels")
        call = convolution_call(node) if is_trained(node) else None
        if call is None or not call.is_depthwise:
            return None
        weight, images = _are_profitable(call.input, call.weight, call.kernel, call.stride)
        if not (weight or images):
            return Skip(node.name, "torch's kernel has optimized gradients for this form")
        if not is_channels_last(call.image):
            return Skip(node.name, "its images are not channels_last")
        if reason := why_missing(library, call.image.dtype):
            return Skip(node.name, reason)
        node.target, node.kwargs = depthwise_low, {}
        node.args = (call.input, call.weight, call.bias, call.stride, call.padding, weight, images)
        what = " and ".join(["weight's gradient"] * weight + ["input's gradient"] * images)
        return Change(self.name, what, node.name, "compiled C instead of the kernel's plain loop")


def _are_profitable(x: Node, weight: Node, kernel: tuple[int, int], stride: tuple[int, int]) -> tuple[bool, bool]:
    """Say whether our gradients of weight and of input are wanted, and faster than oneDNN's: bf16 with dot products.

    Speedups, 8 channels_last images (``benchmarks/depthwise.py``): gradient of the weight 12 to 45 for 7x7 kernels, 11
    to 30 for 5x5, 0.7 for 3x3, which oneDNN JIT-compiles too; of the input 15 to 67 with a stride, for which oneDNN has
    no bf16 kernel, 0.4 to 0.5 without.
    """
    known = _has_dot_products(value(x))
    return known and max(kernel) > MOST_COMPILED and is_trained(weight), known and max(stride) > 1 and is_trained(x)


def _has_dot_products(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and multiplies_bf16()


def _of_sequences(node: Node) -> tuple[Any, ...] | None:
    """Return the arguments of ``depthwise_rows`` for a ``conv1d``; None if that stays."""
    if node.op != "call_function" or node.target not in CALLS or REGION in node.meta:
        return None
    if names_of(node) != ("aten.conv1d",):
        return None
    given = node_info.schema_arguments(SEQUENCES, node.args, dict(node.kwargs))
    x, weight = given["input"], given["weight"]
    if not isinstance(x, Node) or not isinstance(weight, Node) or value(x).dim() != 3 or pair(given["dilation"]) != ONE:
        return None
    out, inner, kernel = (concrete_size(n) for n in value(weight).shape)
    stride, padding = pair(given["stride"])[0], padding_of(given["padding"], (1, kernel))
    if padding is None or inner != 1 or out != given["groups"] or out == 1:
        return None
    own = _are_profitable(x, weight, (1, kernel), (1, stride)) if is_trained(node) else (False, False)
    if not (any(own) or (kernel > MOST_OF_A_SEQUENCE and _has_dot_products(value(x)))):
        return None
    if why_missing(library, value(x).dtype):  # which may compile it
        return None
    return x, weight, given["bias"], (stride,), padding[-1:], *own
