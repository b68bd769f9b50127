"""Matmuls with large fp32 results, computed in chunks that stay in cache until they are upcast.

Before: ``widen(linear_of_packed(x, packed_weight(weight), bias))``, with the whole low-precision result in between.
After: ``linear_widened(x, packed_parts(weight), bias, 0)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.linear.panel_gemm import as_rows
from amp_graph.passes.memory.huge_pages import LargeResults, is_torchs
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.onednn import linear_of_packed_weight, pack_linear_weight
from amp_graph.passes.weights.cache_entry import is_current
from amp_graph.passes.weights.cast_cache import WeightCopies
from amp_graph.passes.weights.packed_copies import PARTS

own_functions(__name__, cached_weights=True)

Parts = tuple[Tensor, ...]


def parts_reader(copies: WeightCopies) -> Callable[[Tensor, int], Tensor | Parts]:
    """Return what graphs call for a weight that only ``linear_widened`` reads: ``packed_parts(weight, outputs)``.

    weight: [outputs, inputs]; outputs: how many each part has, except the last. Packed from the first call on, as by
    ``packed_weight``.
    """
    known = copies.packed[PARTS]

    def packed_parts(weight: Tensor, outputs: int) -> Tensor | Parts:
        starts = range(0, len(weight), outputs)
        kept = [known.get((id(weight), outputs, start)) for start in starts]
        found = [one for one in kept if one is not None and is_current(one, weight)]
        if len(found) == len(starts):
            if copies.checked:
                for start, one in zip(starts, found, strict=True):
                    copies.check(weight[start : start + outputs], one.low.to_dense())
            return tuple(one.low for one in found)
        for start in starts:
            known.pop((id(weight), outputs, start), None)
        low, plain = copies.for_packing(weight)
        if plain is None or not torch.backends.mkldnn.enabled:
            return low
        with torch.inference_mode(False), torch.no_grad():
            packed = [pack_linear_weight(part.contiguous()) for part in low.split(outputs)]
        for start, part in zip(starts, packed, strict=True):
            copies.keep_packed(weight, plain, part, PARTS, (id(weight), outputs, start))
        return tuple(packed)

    return packed_parts


def widened_product(results: LargeResults) -> Callable[..., Tensor]:
    """Return what graphs call: ``linear_widened(x, weight, bias, place)``, ``F.linear(x, weight, bias).float()``.

    x: [..., inputs]; weight: [outputs, inputs], plain or what ``packed_parts`` returns; place: that of the result.
    """

    def linear_widened(x: Tensor, weight: Tensor | Parts, bias: Tensor | None, place: int) -> Tensor:
        if isinstance(weight, Tensor):
            return results.widen_again(F.linear(x, weight, bias), place)
        if is_in_mode(x) or is_torchs(x):
            return F.linear(x, torch.cat([part.to_dense() for part in weight]), bias).float()
        sizes = [part.shape[0] for part in weight]
        out = results.taken((*x.shape[:-1], sum(sizes)), place)
        rows, biases = as_rows(x), [None] * len(sizes) if bias is None else bias.split(sizes)
        places = out.view(len(rows), sum(sizes)).split(sizes, 1)
        for here, part, its in zip(places, weight, biases, strict=True):
            here.copy_(linear_of_packed_weight(rows, part, its))
        return out

    return linear_widened
