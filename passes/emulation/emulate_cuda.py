"""Replace low-precision calls whose kernels on the CPU round otherwise than a GPU's: products, and attention.

Before: ``linear(x_fp16, w_fp16)``. After: ``emulated_linear(x_fp16, w_fp16)``, which is
``linear(x.float(), w.float()).half()``: its gradients are sums in fp32 as well, each rounded to fp16 once. In
attention, FlashAttention and the memory-efficient kernel keep scores and the softmax's sum in fp32. They round the
probabilities, before they are divided by their sum, to low precision for the product with the values; in backward they
round the gradient of the scores for the products with queries and keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from amp_graph.lists import OpClass
from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.fake_values import fake_mode_of, tensors, value
from amp_graph.passes.graph.identify_ops import Operation, is_tensor_call, operations_of, tensor_inputs
from amp_graph.passes.graph.node_info import HALVES, calls_torch, written_arguments
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.decompose_composites import expand

Dtypes = tuple[torch.dtype | None, ...]  # of the results of a call, in the order of their leaves
BIAS = 2  # the position of a convolution's bias


def is_low(leaf: Any) -> bool:
    """Say whether ``leaf`` is a tensor in low precision."""
    return isinstance(leaf, Tensor) and leaf.dtype in HALVES


def widened(leaf: Any) -> Any:
    """Return a low-precision tensor in fp32; anything else as it is."""
    return leaf.float() if is_low(leaf) else leaf


def _rounded(made: Any, dtypes: Dtypes) -> Any:
    leaves, spec = tree_flatten(made)
    if len(leaves) != len(dtypes):
        return made
    return tree_unflatten([_to(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)], spec)


def _to(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and dtype in HALVES else leaf


@functools.cache
def emulated(target: Callable[..., Any], dtypes: Dtypes) -> Callable[..., Any]:
    """Return a function that calls ``target`` in fp32, and rounds its results to ``dtypes``.

    Operands in fp32 or fp64 alone are computed with as they are.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_low, tree_leaves((args, kwargs)))):
            return target(*args, **kwargs)
        return _rounded(target(*tree_map(widened, args), **tree_map(widened, kwargs)), dtypes)

    return _named(call, target)


@functools.cache
def emulated_convolution(target: Callable[..., Any], dtypes: Dtypes) -> Callable[..., Any]:
    """Return a function that calls a convolution in fp32, rounds, adds the bias, and rounds again, as cuDNN does.

    cuDNN's convolutions have no bias: torch adds it to their result, which is in low precision by then.
    """
    alone = emulated(target, dtypes)

    def call(*args: Any, **kwargs: Any) -> Any:
        bias = args[BIAS] if len(args) > BIAS else kwargs.get("bias")
        if bias is None or not is_low(bias):
            return alone(*args, **kwargs)
        args = (*args[:BIAS], *(None for _ in args[BIAS : BIAS + 1]), *args[BIAS + 1 :])
        made = alone(*args, **{**kwargs, **({"bias": None} if "bias" in kwargs else {})})
        spatial = (args[1] if len(args) > 1 else kwargs["weight"]).dim() - 2
        return made + bias.reshape(-1, *(1,) * spatial)

    return _named(call, target)


def _named(call: Callable[..., Any], target: Callable[..., Any]) -> Callable[..., Any]:
    """Name a function after what it calls, which graphs as text show."""
    name = getattr(target, "__name__", type(target).__name__).replace(".", "_")
    call.__name__ = call.__qualname__ = f"emulated_{name}"
    return call


class _Rounded(torch.autograd.Function):
    """Rounds a value to a low dtype, or with ``backward`` its gradient alone; the other of both stays as it is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
        ctx.dtype = dtype if backward else value.dtype
        return value.view_as(value) if backward else value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].to(ctx.dtype).to(gradients[0].dtype), None, None


def emulated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of low-precision operands as a GPU computes it; of others, as torch does."""
    low = query.dtype
    if not is_low(query):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = query.float(), key.float(), value.float()
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = _Rounded.apply(_masked(scores, attn_mask, is_causal), low, True)
    most = scores.detach().amax(-1, keepdim=True)
    unscaled = (scores - most.masked_fill(most == -math.inf, 0.0)).exp()
    total = unscaled.sum(-1, keepdim=True)
    kept = F.dropout(unscaled, dropout_p) if dropout_p else unscaled
    made = _Rounded.apply(kept, low, False) @ v / total.masked_fill(total == 0, 1.0)  # 0 for rows that see nothing
    return made.to(low)


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)


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
    required: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Visit every node that computes in low precision; those that are several operations are taken apart."""
        mode = fake_mode_of(gm)
        left = [node for node in gm.graph.nodes if self._rounds_otherwise(node)]
        while left and mode is not None:
            node = left.pop()
            if _is_composite(node) and (parts := expand(gm, node, frozenset(), mode)) is not None:
                left += filter(self._rounds_otherwise, parts)
            elif why := _why_not(node):
                yield Skip(node.name, f"the CPU's own kernel runs: {why}")
            else:
                node.op, node.target = "call_function", _replacement(node)
                yield Change(self.name, "emulated", node.name, "sums in fp32, and rounds its result once")

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
    return tuple(o for o in operations_of(node) if o.floating)


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
    places = [i for name in (*written_arguments(operation.op), *STATISTICS) for i in operation.operands(name)]
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
