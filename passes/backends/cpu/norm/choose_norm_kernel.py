"""Which kernel computes a residual sum and its norm on the device of a plan, or why torch's operations do.

Before: a norm of the right form. After: "", or ``torch's operations are as fast for (8, 16) on cuda``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from amp_graph.passes.backends.cpu.norm.add_norm_kernel import library
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.native.kernel_table import load_kernel
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.profitability.cuda_kernel_thresholds import norm_kernel_is_profitable
from amp_graph.passes.profitability.thresholds import norm_in_one_pass_is_profitable
from amp_graph.passes.torch_compat.fake import numel


def is_large(node: Node, given: dict[str, Any], planned_for: str) -> bool:
    """Say whether one pass over the value of ``node``, the input of a norm with arguments ``given``, is profitable."""
    device, elements = _device(node, planned_for), numel(value(node))
    if device == "cuda" and all(isinstance(n, int) for n in given["normalized_shape"]):
        return norm_kernel_is_profitable(device, elements, math.prod(given["normalized_shape"]))
    return norm_in_one_pass_is_profitable(device, elements)


def why_no_kernel(node: Node, given: dict[str, Any], low: torch.dtype, planned_for: str) -> str:
    """Return why torch's operations are left for that, or ""."""
    device = _device(node, planned_for)
    if not is_large(node, given, planned_for):
        return f"torch's operations are as fast for {tuple(value(node).shape)} on {device}"
    try:
        library(low) if device == "cpu" else load_kernel(f"add_norm on {device}", low)
    except CompilerError as error:
        return str(error).partition("\n")[0]
    return ""


def _device(node: Node, planned_for: str) -> str:
    """Return the device that the value of ``node`` is planned for: a plan for CUDA may be made on the CPU."""
    own: str = value(node).device.type
    return planned_for if own == "cpu" else own
