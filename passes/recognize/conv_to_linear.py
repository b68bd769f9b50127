"""Replace convolutions by linears if the kernel covers the whole image, or covers it in non-overlapping patches.

Before: ``conv2d(x, w, b)``, ``x`` [batch, in, 7, 7] and ``w`` [out, in, 7, 7], as in VGG's classifier.
After: ``linear(x.flatten(1), w.flatten(1), b).view(-1, out, 1, 1)``.
Before: ``conv2d(x, w, b, 16).flatten(2).transpose(1, 2)``, the patches of a vision transformer.
After: ``linear(patches, w.flatten(1), b).flatten(1, 2)``, where each row of ``patches`` is one 16 x 16 patch of ``x``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.call_arguments import TRANSPOSES, has_norm, swaps_last_two
from amp_graph.passes.graph.edit import describe
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.match import only_reader
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.conv_args import ONE, ConvolutionCall, convolution_call
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.torch_compat.fake import FakeTensorMode, same

# Operations that read [batch, places, channels] of any strides, and return the same result and strides for each.
TAKE_ANY_LAYOUT = (("aten.cat",), ("aten.layer_norm",), ("aten.linear",))


@dataclass(frozen=True)
class ConvToLinear(NodePass):
    """Replaces ``conv2d(x, w, b)`` with ``linear`` when ``w`` is as high and wide as ``x``, or as its strides.

    Law: no padding, dilation or groups; a kernel larger than 1x1, which ``LowerPointwiseConv`` takes; few channels for
    patches. Exactness: rounding-equal, sums in another order. Convolution kernels reorder such large weights and their
    gradients in every call; a linear reads them in their layout. Skipped: convolutions into
    which a batch norm in eval mode will be folded, which gains more.
    """

    options: PipelineOptions

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Replace a convolution."""
        call = convolution_call(node)
        if call is None or call.groups != 1 or (self.options.folds_norms and has_norm(node)):
            return None
        if _covers_the_image(call):
            made, why = _as_linear(gm, call, [], mode), f"its kernel covers images of {call.kernel}"
        elif _is_of_patches(call, rows := _read_in_rows(node)):
            made, why = _as_linear(gm, call, rows, mode), f"over patches of {call.kernel}"
        else:
            return None
        return Change(self.name, "as a linear", made.name, why)


def _covers_the_image(call: ConvolutionCall) -> bool:
    """Say whether the result has exactly one pixel, for all values of symbolic sizes."""
    height, width = call.image.shape[2:]
    fixed = type(height) is int and type(width) is int
    return fixed and (height, width) == call.kernel != ONE and not any(call.padding)


def _is_of_patches(call: ConvolutionCall, rows: list[Node]) -> bool:
    """Say whether non-overlapping patches cover the whole image; ``rows``: nodes that reshape the result to rows."""
    x, (height, width) = call.image, call.kernel
    fixed = type(x.shape[2]) is int and type(x.shape[3]) is int
    if not fixed or call.stride != call.kernel or any(call.padding) or x.shape[2] % height or x.shape[3] % width:
        return False
    return not is_channels_last(x) and patches_are_profitable(x.device.type, call.channels, call.kernel, bool(rows))


def _as_linear(gm: GraphModule, call: ConvolutionCall, rows: list[Node], mode: FakeTensorMode) -> Node:
    """Replace the convolution, or ``rows``, by a linear over patches; return its result, an image without ``rows``."""
    node, graph, (height, width) = call.node, gm.graph, call.kernel
    across = (-1, call.channels, call.image.shape[2] // height, height, call.image.shape[3] // width, width)
    # A weight that lies as channels_last images do is not copied; of several patches, the copy would be slower so.
    innermost = is_channels_last(value(call.weight)) and _covers_the_image(call)
    with graph.inserting_before(node):

        def called(name: str, *args: Any) -> Node:
            return describe(graph.call_method(name, args), node, mode)

        order = (0, 2, 4, 3, 5, 1) if innermost else (0, 2, 4, 1, 3, 5)
        patches = called("permute", called("view", call.input, across), order)
        weight = called("permute", call.weight, (0, 2, 3, 1)) if innermost else call.weight
        given = (called("flatten", patches, 3), called("flatten", weight, 1), call.bias)
        made = describe(graph.call_function(F.linear, given), node, mode)
        made = called("flatten", made, 1, 2) if rows else called("contiguous", called("permute", made, (0, 3, 1, 2)))
    rows = rows or [node]
    rows[-1].replace_all_uses_with(made)
    for old in reversed(rows):
        graph.erase_node(old)
    return made


def _read_in_rows(node: Node) -> list[Node]:
    """Return ``node`` and the nodes that reshape it to [batch, places, channels]; [] if a reader needs its layout."""
    flat = only_reader(node, "aten.flatten", "aten.view", "aten.reshape")
    if flat is None or value(flat).dim() != 3 or not same(value(flat).shape[1], value(node).shape[1]):
        return []
    turned = only_reader(flat, *TRANSPOSES)
    if turned is None or not swaps_last_two(turned):
        return []
    return [node, flat, turned] if all(names_of(user) in TAKE_ANY_LAYOUT for user in turned.users) else []


# Smallest patch side (CPU, GPU) for which a linear over rows is faster; and if the result is used as an image.
LEAST_PATCH, LEAST_PATCH_ON_GPUS, LEAST_PATCH_OF_AN_IMAGE = 4, 2, 8


def patches_are_profitable(device: str, channels: int, kernel: tuple[int, int], in_rows: bool) -> bool:
    """Say whether a convolution over non-overlapping patches is faster as a linear over rows.

    ``in_rows``: the result is read as [batch, places, channels]. Speedups over the convolution, bf16 on CPU, 3
    channels: kernel sides of 14 to 32: training 3.6 to 10, inference 1.9 to 3.6; side 4: training 1.7, inference 1. If
    the result is read as an image, a side of 4 loses its gain to the layout change (ConvNeXt 0.99).
    bf16 on an H100, 3 and 4 channels, 8 to 64 images, CUDA graph: sides of 14 to 32: training 2.6 to 16, inference 2.7
    to 27; 4 and 8: 2.3 to 2.8 and 2.2 to 4.6; 2: 3.1 and 3.6. Read as images: sides of 8 to 32: training 1.5 to 13;
    side 4: inference 0.8. With 96 and 192 channels, convolutions in channels_last are as fast or faster.
    """
    least = LEAST_PATCH_OF_AN_IMAGE if not in_rows else LEAST_PATCH if device == "cpu" else LEAST_PATCH_ON_GPUS
    return device in ("cpu", "cuda") and channels <= 4 and min(kernel) >= least
