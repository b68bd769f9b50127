"""A convolution of images as the rewrites of convolutions read it: its operands, its numbers, and their common law.

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
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.symbolic_sizes import is_contiguous

SCHEMA = torch.ops.aten.conv2d.default
CALLS = frozenset({torch.conv2d, torch.nn.functional.conv2d, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d})
ONE = (1, 1)


@dataclass(frozen=True)
class ConvolutionCall:
    """Arguments of ``conv2d`` [batch, channels, height, width] without dilation, padding in numbers."""

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
        """How many channels the images have."""
        return concrete_size(self.image.shape[1])

    @property
    def kernel(self) -> tuple[int, int]:
        """Height and width of the weight."""
        return pair(value(self.weight).shape[2:])

    @property
    def places(self) -> int:
        """How many places an image of the result has."""
        return math.prod(concrete_size(n) for n in value(self.node).shape[2:])

    @property
    def trains(self) -> bool:
        """Whether the weight gets a gradient."""
        return is_trained(self.node) and is_trained(self.weight)

    @property
    def lies_in_rows(self) -> bool:
        """Whether the images' channels lie innermost, densely: as they do, too, where there is but one place."""
        x = self.image
        if is_image(x):
            return is_channels_last(x)
        return is_contiguous(x) and self.channels > 1 and concrete_size(x.shape[0]) > 0


def calls_convolution(node: Node) -> bool:
    """Say whether ``node`` calls torch's ``conv2d`` itself, in no region whose precision the user set."""
    if node.op != "call_function" or node.target not in CALLS or REGION in node.meta:
        return False
    return names_of(node) == ("aten.conv2d",)


def convolution_call(node: Node) -> ConvolutionCall | str:
    """Return what ``node``, for which ``calls_convolution`` holds, computes; why no rewrite takes it, as text."""
    groups, call = _read(node)
    return call if isinstance(call, str) or groups == 1 else "it has groups"


def depthwise_call(node: Node) -> ConvolutionCall | str:
    """Return what ``node`` computes, as ``convolution_call`` does, where every channel is a group of its own."""
    groups, call = _read(node)
    if isinstance(call, str):
        return call
    alone = 1 < groups == call.channels == concrete_size(value(call.weight).shape[0])
    return call if alone else "its channels are not apart"


def _read(node: Node) -> tuple[int, ConvolutionCall | str]:
    """Return the number of groups, and the rest of a call or why it cannot be read."""
    given = node_info.schema_arguments(SCHEMA, node.args, dict(node.kwargs))
    x, weight = given["input"], given["weight"]
    if not isinstance(x, Node) or not isinstance(weight, Node) or value(x).dim() != 4:
        return 0, "it is not of a batch of images"
    kernel = pair(value(weight).shape[2:])
    padding = padding_of(given["padding"], kernel)
    if padding is None or (pair(given["dilation"]) != ONE and kernel != ONE):
        return 0, "it has dilation, or padding on one side"
    return given["groups"], ConvolutionCall(node, x, weight, given["bias"], pair(given["stride"]), padding)


def padding_of(given: Any, kernel: tuple[int, int]) -> tuple[int, int] | None:
    """Return the padding in numbers; None where it differs from side to side ("same" for an even kernel)."""
    if not isinstance(given, str):
        return pair(given)
    if given == "valid":
        return (0, 0)
    return (kernel[0] // 2, kernel[1] // 2) if all(size % 2 for size in kernel) else None


def pair(given: Any) -> tuple[int, int]:
    """Return a size, a stride, a padding or a dilation for both directions."""
    found = (given,) if isinstance(given, int) else tuple(given)
    return concrete_size(found[0]), concrete_size(found[-1])
