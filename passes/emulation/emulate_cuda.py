"""Replace low-precision calls whose kernels on the CPU round otherwise than a GPU's.

Before: ``linear(x_fp16, w_fp16)``. After: ``emulated_linear(x_fp16, w_fp16)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.emulation.rounded_calls import emulated, emulated_attention, emulated_convolution, is_low
from amp_graph.passes.graph.fake_values import fake_mode_of, tensors, value
from amp_graph.passes.graph.identify_ops import Identity, Operation, is_tensor_call, tensor_inputs
from amp_graph.passes.graph.meta_keys import IDENTITY
from amp_graph.passes.graph.node_info import calls_torch
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.decompose_composites import expand

ATTENTION = "aten.scaled_dot_product_attention"
CONVOLUTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    )
)  # fmt: skip
# What else the CPU's fp16 kernels round within, or have no fp16 kernel for (torch 2.13, by comparison of every kernel
# with the same in fp32). Backward of none of these reads its result, which the GPU's backward would read rounded.
ROUNDED_WITHIN = frozenset(
    f"aten.{name}"
    for name in (
        "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
        "cudnn_batch_norm", "instance_norm", "layer_norm", "native_layer_norm", "group_norm", "native_group_norm",
        "rms_norm", "_fused_rms_norm",
        "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "addr", "bilinear", "_trilinear", "linalg_cross", "cross", "glu", "rrelu",
    )
)  # fmt: skip
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class EmulateCuda(Pass):
    """Replaces low-precision products, convolutions, attention, norms and pools by fp32 ones that round once.

    Law: an operation that the lists allow in low precision computes on the same rounded operands. Exactness:
    approximate (the sums of this CPU's kernels become sums in fp32; results and gradients are rounded once).
    """

    options: PipelineOptions
    name: ClassVar[str] = "emulate-cuda"
    required: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every node that computes in low precision; those that are several operations are taken apart."""
        changes, skips, mode = [], [], fake_mode_of(gm)
        left = [node for node in gm.graph.nodes if self._rounds_otherwise(node)]
        while left and mode is not None:
            node = left.pop()
            if _is_composite(node) and (parts := expand(gm, node, frozenset(), mode)) is not None:
                left += filter(self._rounds_otherwise, parts)
            elif why := _why_not(node):
                skips.append(Skip(node.name, f"the CPU's own kernel runs: {why}"))
            else:
                node.op, node.target = "call_function", _replacement(node)
                changes.append(Change(self.name, "emulated", node.name, "sums in fp32, and rounds its result once"))
        return PassResult(gm, tuple(changes), tuple(skips))

    def _rounds_otherwise(self, node: Node) -> bool:
        """Say whether the GPU's kernel for ``node`` may round otherwise than the CPU's."""
        return _is_computed_low(node) and any(map(self._is_emulated, _operations(node)))

    def _is_emulated(self, operation: Operation) -> bool:
        if operation.packet in ROUNDED_WITHIN:
            return True
        rule = self.options.lists.lookup(operation.op, operation.arguments)
        return rule is not None and rule.cls is OpClass.ALLOW


def _is_computed_low(node: Node) -> bool:
    made = tensors(value(node))
    reads = is_tensor_call(node) and any(is_low(t) for source in node.all_input_nodes for t in tensors(value(source)))
    return reads and bool(made) and is_low(made[0])


def _operations(node: Node) -> tuple[Operation, ...]:
    found = node.meta.get(IDENTITY)
    return tuple(o for o in found.operations if o.floating) if isinstance(found, Identity) else ()


def _is_composite(node: Node) -> bool:
    """Say whether ``node`` is several operations that the GPU rounds after each; cuDNN has a recurrent layer as one."""
    return len(_operations(node)) > 1 and getattr(node.target, "__name__", "") not in RECURRENT


def _why_not(node: Node) -> str:
    """Return why ``node`` cannot be called on fp32 copies of its operands; "" if it can."""
    if _is_composite(node):
        return "it is several operations that cannot be taken apart"
    if not calls_torch(node):
        return "the call is not torch's"
    inputs, operation = tensor_inputs(node), _operations(node)[0]
    written = [a.name for a in operation.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    places = [i for name in (*written, *STATISTICS) for i in operation.operands(name)]
    if any(is_low(t) for i in places if i < len(inputs) for t in tensors(value(inputs[i]))):
        return "it writes to a tensor in low precision"
    return ""


def _replacement(node: Node) -> Callable[..., Any]:
    target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    dtypes = tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(value(node)))
    packet = _operations(node)[0].packet
    if packet == ATTENTION:
        return emulated_attention
    return (emulated_convolution if packet in CONVOLUTIONS else emulated)(target, dtypes)
