"""Weights in a kernel's own layout, packed once per update, for graphs without gradients.

Before: ``linear(x, weight_copy(weight), bias)``, which packs the copy at every call.
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
from amp_graph.passes.torch_compat.dispatch import is_in_mode, is_seen
from amp_graph.passes.torch_compat.onednn import linear_of_packed_weight, pack_linear_weight
from amp_graph.passes.weights.cache_entry import KeptCopy, is_current
from amp_graph.passes.weights.cast_cache import WeightCopies
from amp_graph.passes.weights.finite_check import FiniteWeights, is_finite
from amp_graph.passes.weights.packed_copies import PACKED, PANELS, TRANSPOSED, TRANSPOSED_PANELS

own_functions(__name__, cached_weights=True)

PackedWeight = Callable[[Tensor], Tensor]
NOTED = "it is noted whether it is finite"
LOOKED_AT = 3  # the read of one packed weight at which it is checked


def packed_reader(
    copies: WeightCopies, transposed: bool = False, in_panels: bool = False, noted: bool = False
) -> PackedWeight:
    """Return what graphs call for a weight [outputs, inputs], or [outputs, ...], that only ``linear_of_packed`` reads.

    ``transposed``: the weight is [inputs, outputs], and the result its transpose. ``in_panels``: ``linear_of_panels``
    reads it instead. ``noted``: tell ``copies.finite`` whether it is finite. That is checked from the third read on,
    because checking a weight that is updated every few calls takes longer than it saves; until then the weight counts
    as not finite, which changes no number.

    It is packed from the first call on: two calls with the same weights have the same bits, because sums in another
    order would differ. The plain copy is freed unless others read it, so memory is that of one copy.
    """
    store = ((PACKED, TRANSPOSED), (PANELS, TRANSPOSED_PANELS))[in_panels][transposed]
    known = copies.packed[store]  # one dictionary for as long as the copies live

    def packed_weight(weight: Tensor) -> Tensor:
        kept = known.get(id(weight))
        if kept is not None and is_current(kept, weight):
            if copies.checked:
                copies.check(weight, _unpacked(weight, kept.low))
            return kept.low if kept.beside is NOTED else _told(weight, kept)
        return _pack(weight)

    def _told(weight: Tensor, kept: KeptCopy) -> Tensor:
        if kept.beside is not NOTED:  # it is how often it was read, by graphs that ask or not
            kept.beside = reads = (kept.beside or 0) + 1
            if noted:
                looked = reads >= LOOKED_AT
                _note(weight, looked and is_finite(_unpacked(weight, kept.low)))
                kept.beside = NOTED if looked else reads
        return kept.low

    def _note(weight: Tensor, finite: bool) -> None:
        copies.finite.note((store, id(weight)), weight, finite)

    def _unpacked(weight: Tensor, low: Tensor) -> Tensor:
        rows = weight.flatten(1).shape
        dense = dense_of(low, *(reversed(rows) if transposed else rows)) if in_panels else low.to_dense()
        return (dense.t() if transposed else dense).view(weight.shape)

    def _pack(weight: Tensor) -> Tensor:
        before = known.pop(id(weight), None)
        low, plain = copies.for_packing(weight)
        if plain is None or not (in_panels or torch.backends.mkldnn.enabled):
            if noted:
                _note(weight, False)
            return low.t() if transposed else low.flatten(1)
        if before is not None and copies.same_as_packed(weight, plain, before):
            known[id(weight)] = before
            return _told(weight, before)
        low = low.t() if transposed else low.flatten(1)
        with torch.inference_mode(False), torch.no_grad():
            packed = panels_of(low) if in_panels else pack_linear_weight(low.contiguous())
        return _told(weight, copies.keep_packed(weight, plain, packed, store))

    return packed_weight


def linear_of_panels(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", outputs: int = 0, wide: bool = False
) -> Tensor:
    """``F.linear(x, weight, bias)`` without gradients, for a ``weight`` in panels or plain, through ``after``.

    after: "none" or "relu", which propagates NaN. outputs: the weight's number of outputs. wide: return fp32, which
    with panels is not rounded before.
    """
    if weight.dim() == 2 or is_in_mode(x):
        dense = weight if weight.dim() == 2 else dense_of(weight, outputs, x.shape[-1])
        found = linear_of_packed(x, dense, bias, after)
        return found.float() if wide else found
    if not is_seen(x):
        return linear_by_panels(x, weight, bias, after == "relu", outputs, wide)
    found = OPS.linear_by_panels.default(x, weight, bias, after == "relu", outputs, wide)  # the name in profiles
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


def relu_linear_of(weights: FiniteWeights) -> Callable[..., Tensor]:
    """Return what graphs call: ``relu_linear(x, weight, bias, finite)``, ``linear_of_packed(x, weight, bias, "relu")``.

    finite: whether ``x`` and ``bias`` are, if all weights are: then the relu is the kernel's.
    """

    def relu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, finite: bool) -> Tensor:
        if finite and weight.layout is not torch.strided and weights.is_all_finite:
            return linear_of_packed_weight(x, weight, bias, "relu")
        return linear_of_packed(x, weight, bias, "relu")

    return relu_linear
