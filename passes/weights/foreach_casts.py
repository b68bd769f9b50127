"""Cast many weights at once, on devices where a call costs more than a cast: GPUs.

Before: ``a = w1.bfloat16(); b = w2.bfloat16()``, one kernel and one autograd node each. After: ``a, b = low_weights(w1,
w2)``: one kernel for all weights that keep their order in memory, and in backward one that upcasts their gradients.
Source of the kernels: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.cuda import stream_of
from amp_graph.passes.torch_compat.dispatch import is_batched
from amp_graph.passes.torch_compat.storage import unflatten
from amp_graph.passes.weights.group_copies import GroupCopies

own_functions(__name__)

Format = torch.memory_format | None
ALIGNED = 64  # elements: alignment of the parts of a shared buffer, as fast to read as separate allocations
LowWeights = Callable[..., Sequence[Tensor]]


class WeightGroup:
    """Weights that are cast together to ``dtype``, each into its ``formats``, where that is not None.

    All are cast at every call, unless ``between`` keeps copies of later micro-batches. Without gradients, they are cast
    into memory that is reused between the calls of one stream, and released by the allocator's rules when another
    stream calls. While a CUDA graph is recorded, which must own what it writes to, memory is not reused. With
    gradients, the results are new tensors, which autograd saves.
    """

    def __init__(self, dtype: torch.dtype, formats: Sequence[Format]) -> None:
        self.dtype = dtype
        self.formats = tuple(formats)
        self._last: tuple[int, list[Tensor]] | None = None  # a stream, and what was made for it; replaced as a whole
        self.read = self._reader()
        self.between: GroupCopies | None = None
        self._parts: Parts | None = None  # known from the first call on

    def _reader(self) -> LowWeights:
        """Return what graphs call."""

        def low_weights(*weights: Tensor) -> Sequence[Tensor]:
            if torch.is_grad_enabled():
                trained = weights[0].requires_grad
                return _LowWeights.apply(self, *weights) if trained else self.cast(self.new(weights), weights)
            stream = stream_of(weights[0])
            if stream is None:
                return self.cast(self.new(weights), weights)
            last = self._last
            if last is None or last[0] != stream:
                last = self._last = stream, self.new(weights)
            return self.cast(last[1], weights)

        return low_weights

    @property
    def kept(self) -> list[Tensor]:
        """The memory that is kept."""
        last, between = self._last, self.between
        return [*(last[1] if last is not None else []), *(between.tensors if between is not None else [])]

    def drop(self) -> None:
        """Release that memory."""
        self._last = None
        if self.between is not None:
            self.between.drop()

    def new(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for one cast of ``weights``."""
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode cannot be used outside
            return [self._alone(i, w) for i, w in enumerate(weights)]

    def new_in_one_piece(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the same, with weights packed into shared buffers: half as long, but no part can be freed alone."""
        together = {i: w for i, w in enumerate(weights) if self._fits(i, w)}
        if not together:
            return self.new(weights)
        parts = list(together.values())
        piece = torch.empty(sum(w.numel() for w in parts), dtype=self.dtype, device=parts[0].device)
        found = dict(zip(together, unflatten(piece, parts), strict=True))
        return [found[i] if i in found else self._alone(i, w) for i, w in enumerate(weights)]

    def _alone(self, place: int, weight: Tensor) -> Tensor:
        return torch.empty_like(weight, dtype=self.dtype, requires_grad=False, **_format(self.formats[place]))

    def _fits(self, place: int, weight: Tensor) -> bool:
        return self.formats[place] is None and weight.numel() % ALIGNED == 0 and weight.is_contiguous()

    def cast(self, low: list[Tensor], weights: tuple[Tensor, ...]) -> list[Tensor]:
        """Cast ``weights`` into ``low``. Their strides are those of the capture."""
        if self._parts is None:
            self._parts = by_layout(low, weights)
        copy_all(low, weights, self._parts)
        return low


class _LowWeights(torch.autograd.Function):
    """One cast of several weights, and of their gradients back."""

    @staticmethod
    def forward(ctx: Any, group: WeightGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.weights = weights  # for their layout only
        between = group.between
        kept = None if between is None else between.read(weights)
        if kept is not None:
            return tuple(kept)
        signs = None if between is None else between.signs(weights)
        low = group.cast(group.new_in_one_piece(weights), weights)
        if between is None or signs is None:
            return tuple(low)
        between.keep(weights, low, signs)
        return tuple(t.detach() for t in low)  # aliases: autograd records these, and the copies outlive the graph

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = [g for g in grads if g is not None]
        if not given or torch.is_grad_enabled() or any(map(is_batched, given)):
            return None, *(None if g is None else g.to(w.dtype) for g, w in zip(grads, ctx.weights, strict=True))
        wide = [
            torch.empty_like(w, requires_grad=False) for w, g in zip(ctx.weights, grads, strict=True) if g is not None
        ]
        copy_all(wide, given, by_layout(wide, given))
        rest = iter(wide)
        return None, *(None if g is None else next(rest) for g in grads)


def low_weight(weight: Tensor, group: Sequence[Tensor], place: int) -> Tensor:
    """Return the cast of ``weight`` from a group; the call names the weight in printed graphs."""
    return group[place]


@dataclass(frozen=True)
class Parts:
    """What one kernel copies, and what is copied tensor by tensor: places in two lists of tensors.

    ``strided``: the strides under which a tensor is passed, where its own differ only in dimensions of size 1, as those
    of a 1 x 1 convolution do in channels_last: torch compares all of them.
    """

    alike: tuple[int, ...]
    others: tuple[int, ...]
    strided: Mapping[int, tuple[int, ...]]


def by_layout(into: Sequence[Tensor], given: Sequence[Tensor]) -> Parts:
    """Split ``given`` by whether its memory has the order of its place."""
    alike, others, strided = [], [], {}
    for i, (a, b) in enumerate(zip(into, given, strict=True)):
        if a.stride() == b.stride():
            alike.append(i)
        elif all(x == y for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size != 1):
            alike.append(i)
            strided[i] = a.stride()
        else:
            others.append(i)
    return Parts(tuple(alike), tuple(others), strided)


def copy_all(into: list[Tensor], given: list[Tensor] | tuple[Tensor, ...], parts: Parts) -> None:
    """Copy each of ``given`` into its destination, one call for each part."""
    if parts.strided:
        given = [b.as_strided(b.shape, parts.strided[i]) if i in parts.strided else b for i, b in enumerate(given)]
    if not parts.others:
        torch._foreach_copy_(into, given)
        return
    for part in (parts.alike, parts.others):
        if part:
            torch._foreach_copy_([into[i] for i in part], [given[i] for i in part])


def _format(into: Format) -> dict[str, Any]:
    return {} if into is None else {"memory_format": into}
