"""Read the arguments of image convolutions: operands, stride and padding, and the conditions common to all rewrites.

Before: the node ``conv2d(x, w, None, 2, "valid")``. After: ``ConvolutionCall(x, w, None, stride=(2, 2), ...)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.layout.memory_format import is_channels_last, is_image
from amp_graph.passes.torch_compat.fake import concrete_size, is_contiguous

SCHEMA = torch.ops.aten.conv2d.default
CALLS = frozenset({torch.conv2d, torch.nn.functional.conv2d, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d})
ONE = (1, 1)


@dataclass(frozen=True)
class ConvolutionCall:
    """Arguments of a ``conv2d`` on [batch, channels, height, width] without dilation; padding as numbers."""

    node: Node
    input: Node
    weight: Node
    bias: Node | None
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def image(self) -> torch.Tensor:
        """The fake value of the images."""
        found: torch.Tensor = value(self.input)
        return found

    @property
    def channels(self) -> int:
        """The number of channels of the images."""
        return concrete_size(self.image.shape[1])

    @property
    def kernel(self) -> tuple[int, int]:
        """Height and width of the weight."""
        return pair(value(self.weight).shape[2:])

    @property
    def places(self) -> int:
        """The number of pixels of one output image."""
        return math.prod(concrete_size(n) for n in value(self.node).shape[2:])

    @property
    def trains(self) -> bool:
        """Whether the weight gets a gradient."""
        return is_trained(self.node) and is_trained(self.weight)

    @property
    def lies_in_rows(self) -> bool:
        """Whether the images are dense with their channels innermost, as images of one pixel are too."""
        x = self.image
        if is_image(x):
            return is_channels_last(x)
        return is_contiguous(x) and self.channels > 1 and concrete_size(x.shape[0]) > 0


def calls_convolution(node: Node) -> bool:
    """Say whether ``node`` calls torch's ``conv2d`` outside of regions whose precision the user set."""
    if node.op != "call_function" or node.target not in CALLS or REGION in node.meta:
        return False
    return names_of(node) == ("aten.conv2d",)


def convolution_call(node: Node) -> ConvolutionCall | str:
    """Return the arguments of ``node``, for which ``calls_convolution`` holds; or, as text, why no rewrite applies."""
    groups, call = _read(node)
    return call if isinstance(call, str) or groups == 1 else "it has groups"


def depthwise_call(node: Node) -> ConvolutionCall | str:
    """Return the arguments of a depthwise convolution, as ``convolution_call`` does for other ones."""
    groups, call = _read(node)
    if isinstance(call, str):
        return call
    alone = 1 < groups == call.channels == concrete_size(value(call.weight).shape[0])
    return call if alone else "it is not depthwise"


def _read(node: Node) -> tuple[int, ConvolutionCall | str]:
    """Return the number of groups, and the other arguments or why they are not supported."""
    given = node_info.schema_arguments(SCHEMA, node.args, dict(node.kwargs))
    x, weight = given["input"], given["weight"]
    if not isinstance(x, Node) or not isinstance(weight, Node) or value(x).dim() != 4:
        return 0, "its input is not a batch of images"
    kernel = pair(value(weight).shape[2:])
    padding = padding_of(given["padding"], kernel)
    if padding is None or (pair(given["dilation"]) != ONE and kernel != ONE):
        return 0, "it has dilation or asymmetric padding"
    return given["groups"], ConvolutionCall(node, x, weight, given["bias"], pair(given["stride"]), padding)


def padding_of(given: Any, kernel: tuple[int, int]) -> tuple[int, int] | None:
    """Return the padding as numbers; None if it is asymmetric ("same" with an even kernel)."""
    if not isinstance(given, str):
        return pair(given)
    if given == "valid":
        return (0, 0)
    return (kernel[0] // 2, kernel[1] // 2) if all(size % 2 for size in kernel) else None


def pair(given: Any) -> tuple[int, int]:
    """Return a size, a stride, a padding or a dilation for both directions."""
    found = (given,) if isinstance(given, int) else tuple(given)
    return concrete_size(found[0]), concrete_size(found[-1])
