"""Weights in a kernel's own layout, packed once, for frozen models.

Before: ``linear(x, frozen_weight(weight), bias)``, which packs it at every call.
After: ``linear_of_packed(x, packed_weight(weight), bias)``, with a fused activation if that is the only reader; or,
over few rows, ``linear_of_panels``, by a kernel of ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.inference.activations import activated, relu_in_place
from amp_graph.passes.backends.cpu.linear.panel_gemm import dense_of, linear_by_panels, panels_of
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.devices import linear_of_packed_weight, pack_linear_weight
from amp_graph.passes.torch_compat.dispatch import is_in_mode, is_seen
from amp_graph.passes.weights.frozen_weights import FrozenWeights

own_functions(__name__, frozen_weights=True)

PackedWeight = Callable[[Tensor], Tensor]


def packed_reader(weights: FrozenWeights, transposed: bool = False, in_panels: bool = False) -> PackedWeight:
    """Return what graphs call for a weight [outputs, inputs] that only ``linear_of_packed`` reads.

    ``transposed``: the weight is [inputs, outputs], and the result its transpose. ``in_panels``: ``linear_of_panels``
    reads it instead. It is packed from the first call on: two calls with the same weights have the same bits, because
    sums in another order would differ.
    """
    kind = ("panels" if in_panels else "packed", transposed)

    def as_matrix(weight: Tensor) -> Tensor:
        low = weight.to(weights.dtype)
        return low.t() if transposed else low

    def packed_weight(weight: Tensor) -> Tensor:
        def make() -> Tensor:
            low = as_matrix(weight.detach())
            return panels_of(low) if in_panels else pack_linear_weight(low.contiguous())

        if in_panels or torch.backends.mkldnn.enabled:
            found: Tensor | None = weights.form(kind, make, weight)
            if found is not None:
                return found
        return as_matrix(weight)

    return packed_weight


def linear_of_panels(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", outputs: int = 0
) -> Tensor:
    """``F.linear(x, weight, bias)`` without gradients, for a ``weight`` in panels or plain, through ``after``.

    after: "none" or "relu", which propagates NaN. outputs: the weight's number of outputs.
    """
    if weight.dim() == 2 or is_in_mode(x):
        dense = weight if weight.dim() == 2 else dense_of(weight, outputs, x.shape[-1])
        return linear_of_packed(x, dense, bias, after)
    if not is_seen(x):
        return linear_by_panels(x, weight, bias, after == "relu", outputs)
    found: Tensor = OPS.linear_by_panels.default(x, weight, bias, after == "relu", outputs)  # the name in profiles
    return found


def linear_of_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", form: str = "none"
) -> Tensor:
    """``F.linear(x, weight, bias)`` without gradients, for a ``weight`` that is packed or plain, through ``after``.

    after: "none", "relu", "silu", or "gelu" in the ``form`` "none" or "tanh". The kernel applies the last two to its
    fp32 sums; its relu would turn NaN into 0.
    """
    if weight.layout is torch.strided:
        return activated(F.linear(x, weight, bias), after, form)
    if after == "gelu":
        return linear_of_packed_weight(x, weight, bias, "gelu", form)
    if after == "silu":
        return linear_of_packed_weight(x, weight, bias, "swish")
    out = linear_of_packed_weight(x, weight, bias)
    return relu_in_place(out) if after == "relu" else out
