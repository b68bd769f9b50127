"""Read the arguments of image convolutions: operands, stride and padding, and the conditions common to all rewrites.

Before: the node ``conv2d(x, w, None, 2, "valid")``. After: ``ConvolutionCall(x, w, None, stride=(2, 2), ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
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
    groups: int

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
    def is_depthwise(self) -> bool:
        """Whether each channel has a group and a result of its own."""
        return 1 < self.groups == self.channels == concrete_size(value(self.weight).shape[0])

    @property
    def lies_in_rows(self) -> bool:
        """Whether the images are dense with their channels innermost, as images of one pixel are too."""
        x = self.image
        if is_image(x):
            return is_channels_last(x)
        return is_contiguous(x) and self.channels > 1 and concrete_size(x.shape[0]) > 0


def convolution_call(node: Node) -> ConvolutionCall | None:
    """Return the arguments of a call of torch's ``conv2d`` outside of regions whose precision the user set.

    None for any other node, and for a convolution over no batch of images, or with dilation or asymmetric padding.
    """
    if node.op != "call_function" or node.target not in CALLS or REGION in node.meta:
        return None
    if names_of(node) != ("aten.conv2d",):
        return None
    given = node_info.schema_arguments(SCHEMA, node.args, dict(node.kwargs))
    x, weight = given["input"], given["weight"]
    if not isinstance(x, Node) or not isinstance(weight, Node) or value(x).dim() != 4:
        return None
    kernel = pair(value(weight).shape[2:])
    padding = padding_of(given["padding"], kernel)
    if padding is None or (pair(given["dilation"]) != ONE and kernel != ONE):
        return None
    return ConvolutionCall(node, x, weight, given["bias"], pair(given["stride"]), padding, given["groups"])


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
