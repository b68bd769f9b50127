"""Pad the dimensions of matmuls and convolutions to the multiples that tensor cores need.

Before: ``linear(x, w)`` with a vocabulary of 50257.
After: ``aligned_linear(x, w)``, which multiplies by 50264 rows, the last seven of them zero, and narrows the result.
Parameters keep their shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import run_node, value
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.meta_keys import CAST, IDENTITY, REGION
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size

own_functions(__name__)

MULTIPLE = 8  # elements of 16 bits
IMAGE = 4  # channels of a first convolution for which cuDNN has special kernels


def missing(size: int) -> int:
    """Return the padding of ``size`` to the next multiple of 8."""
    return -size % MULTIPLE


def missing_channels(channels: int) -> int:
    """Return the channel padding of an image: 3 to 4, more than 4 to the next multiple of 8; 1 and 2 stay."""
    return IMAGE - channels if channels == IMAGE - 1 else missing(channels) if channels > IMAGE else 0


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dense: bool) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, computed with both dimensions of ``weight`` padded to multiples of 8.

    x [..., in], weight [out, in], bias [out], of one dtype. ``dense``: return the layout of ``linear``; else a view of
    the padded result. Zeros do not change any sum: gradients are those of ``linear``.
    """
    columns, rows = missing(weight.shape[1]), missing(weight.shape[0])
    if columns:
        x = F.pad(x, (0, columns))
    if rows and bias is not None:
        bias = F.pad(bias, (0, rows))
    out = F.linear(x, F.pad(weight, (0, columns, 0, rows)), bias)
    if not rows:
        return out
    narrow = out[..., : weight.shape[0]]
    return narrow.contiguous() if dense else narrow


def aligned_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int] | str,
    dilation: list[int],
) -> Tensor:
    """Return ``F.conv2d`` of x [batch, in, height, width], computed with zero-padded input channels."""
    short = missing_channels(x.shape[1])
    layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    x = F.pad(x, (0, 0, 0, 0, 0, short)).contiguous(memory_format=layout)
    return F.conv2d(x, F.pad(weight, (0, 0, 0, 0, 0, short)), bias, stride, padding, dilation)


CONVOLUTION = ("aten.conv2d",)


@dataclass(frozen=True)
class PadShapes(NodePass):
    """Replaces ``linear`` of odd sizes with ``aligned_linear``.

    Law: in low precision; a linear with input or output sizes that are no multiples of 8. The result's layout is
    unchanged, unless only casts read it. Exactness: rounding-equal, gradients included: zeros are added to sums, which
    a kernel may order differently.
    """

    options: PipelineOptions
    operation: ClassVar[tuple[str, ...]] = ("aten.linear",)

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Pad a call of ``operation`` whose sizes are odd, if that is profitable."""
        given, convolves = _operands(node, self.operation), self.operation == CONVOLUTION
        if given is None or value(node).dtype.itemsize != 2:
            return None
        told = _odd_channels(given["weight"]) if convolves else _odd_sizes(given["weight"])
        if not told:
            return None
        # Multiply-adds: one for each element of the result and each that it sums over.
        work = math.prod(concrete_size(n) for n in (*value(node).shape, *value(given["weight"]).shape[1:]))
        lies = not convolves or is_channels_last(value(given["input"]))
        device = self.options.planned_for
        if not (lies and aligning_is_profitable(device, value(node).dtype, work)):
            why = f"in {work} products" if lies else "in images that are not channels_last"
            # On a CPU nothing is padded, and no report is wanted.
            return None if device == "cpu" else Skip(node.name, f"{told} are not worth padding {why}")
        if not _align(node, given, convolves, mode):
            return None
        return Change(self.name, "padded", node.name, f"{told}: tensor cores take multiples of 8")


@dataclass(frozen=True)
class PadChannels(PadShapes):
    """Replaces ``conv2d`` of an odd number of channels with ``aligned_conv2d``.

    Law: in low precision; a convolution without groups over channels_last images, whose input channels are padded from
    3 to 4, or from more than 4 to a multiple of 8 (cuDNN transposes other images to pad them: on an H100 the 16 x 16
    patches of a ViT took 124 us instead of 71). Exactness: rounding-equal, gradients included: zeros are added to sums,
    which a kernel may order differently.
    """

    operation: ClassVar[tuple[str, ...]] = CONVOLUTION


def _operands(node: Node, operation: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the arguments of a linear or a convolution that torch itself computes."""
    ours = str(getattr(node.target, "__module__", "")).startswith("amp_graph")
    if names_of(node) != operation or node.op != "call_function" or REGION in node.meta or ours:
        return None
    given = arguments_of(node)
    return given if given is not None and value(given["weight"]).dim() > 1 else None


def _odd_sizes(weight: Node) -> str:
    outside, inside = (concrete_size(n) for n in value(weight).shape)
    odd = [f"{n} {what}" for n, what in ((inside, "inputs"), (outside, "outputs")) if missing(n)]
    return " and ".join(odd)


def _odd_channels(weight: Node) -> str:
    channels = concrete_size(value(weight).shape[1])
    return f"{channels} channels" if value(weight).dim() == 4 and missing_channels(channels) else ""


def _align(node: Node, given: dict[str, Any], convolves: bool, mode: FakeTensorMode) -> bool:
    operands = tuple(given[name] for name in ("input", "weight", "bias"))
    if convolves:
        if given["groups"] != 1 or value(node).dim() != 4:
            return False
        node.target, node.args = aligned_conv2d, (*operands, *(given[n] for n in ("stride", "padding", "dilation")))
    else:
        dense = not all(CAST in n.meta or (n.op, n.target) == ("call_method", "float") for n in node.users)
        node.target, node.args = aligned_linear, (*operands, dense)
    node.kwargs = {}
    node.meta.pop(IDENTITY, None)
    set_value(node, run_node(node, mode))
    return True


# Multiplications below which call overhead exceeds the time of the kernel.
LEAST_ALIGNED = 1 << 24


def aligning_is_profitable(device: str, dtype: torch.dtype, products: int) -> bool:
    """Say whether a matmul of odd sizes is faster when they are padded to multiples of 8.

    CUDA: from NVIDIA's documentation of matrix multiplication alone ("Performance Requirements for Tensor Cores": 16
    bytes, 8 elements of fp16 or bf16). CPU: not profitable. Speedups of bf16 with dot products, GPT-2's 50257 words
    padded to 50264, 1,024 and 256 rows: forward and input gradient 1.01 to 1.03, weight gradient 1.12. The padding
    itself, which copies the weight and the logits' gradient, is not included.
    """
    return device == "cuda" and dtype in HALVES and products >= LEAST_ALIGNED
