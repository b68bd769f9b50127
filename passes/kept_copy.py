"""One low-precision copy of a parameter, and the signs by which a write to that parameter shows.

Before: ``low = weight.bfloat16()``. After: ``KeptCopy(low, weight._version, ...)``, which is that of ``weight`` for as
long as its storage, address, strides, version counter and some words of its memory are what they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes import cast_kernel
from amp_graph.passes.torch_private import StorageWeakRef, borrow, holders, is_batched, storage_key

LARGE = 131_072  # elements: above, memory is returned to the system when it is freed


@dataclass(eq=False, slots=True)
class KeptCopy:
    """One copy, and what the parameter looked like when it was made: replaced as a whole, for threads read it."""

    low: Tensor
    version: int
    mark: object
    # Held weakly, so that no other storage gets this one's identity, and none is kept from being freed.
    storage: StorageWeakRef
    key: int
    pointer: int
    stride: tuple[int, ...]
    words: memoryview
    values: bytes
    given: Tensor | None = None  # ``low`` with a way back for gradients, made when a call with gradients reads it
    reused: bool = False  # whether the copy was of any use
    passed: object = None  # the mark of an update after which no copy was made
    asked: int = 0  # how often it was to be read packed
    for_packing: bool = False  # made for nothing but to be packed
    beside: Any = None  # what was made along with it
    proven: int = 0  # behind how many updates in a row it was found as it was: see frozen_weights.py

    def again(self, low: Tensor, version: int, mark: object) -> KeptCopy:
        """Return what is known once the same parameter was cast anew, to ``low``."""
        stable = (self.storage, self.key, self.pointer, self.stride, self.words)
        given = self.given if low is self.low else None
        return KeptCopy(low, version, mark, *stable, self.words.tobytes(), given, self.passed is mark)


def is_passed_over(kept: KeptCopy, weight: Tensor) -> bool:
    """Say whether the first call of an update makes no copy: a small one that is read once is not worth it."""
    return not kept.reused and weight.numel() < LARGE


def is_of(kept: KeptCopy, weight: Tensor) -> bool:
    """Say whether ``kept`` was made of ``weight``, and that is where it was."""
    same = storage_key(weight) == kept.key  # before all else: an id may be another parameter's by now
    return same and weight.data_ptr() == kept.pointer and weight.stride() == kept.stride


def lend(weight: Tensor, low: Tensor) -> Tensor:
    """Return the copy ``low`` as a tensor whose gradient goes to ``weight``, as ``borrow`` does; large ones by C."""
    of_places = weight.dim() == 4 and weight[0, 0].numel() > 1  # whose gradient may lie otherwise
    large = cast_kernel.LARGE_OF_PLACES if of_places else cast_kernel.LARGE
    if weight.numel() < large or cast_kernel.library(low.dtype) is None:
        return borrow(weight, low)
    found: Tensor = _Lent.apply(weight, [low])
    return found


class _Lent(torch.autograd.Function):
    """Saves nothing, and so serves any number of backwards."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: list[Tensor]) -> Tensor:
        ctx.weight = weight  # for its layout alone
        given = low[0].new_empty(0)
        given.data = low[0]  # no view, and with a version counter of its own
        return given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() or is_batched(grad):  # create_graph=True, is_grads_batched=True
            return grad.float(), None
        return cast_kernel.widened(grad, ctx.weight), None


class _Holder:
    def __init__(self) -> None:
        self.low = torch.empty(1)


def is_nobody_elses(kept: KeptCopy) -> bool:
    """Say whether no graph, alias or thread has the copy, or the way back that was made for it."""
    if kept.given is None:
        return holders(kept, "low") == _ALONE
    return holders(kept, "low") == holders(kept, "given") == _BORROWED


_HOLDER = _Holder()
_ALONE = holders(_HOLDER, "low")  # what is counted of a tensor that one attribute holds
_ALIAS = _HOLDER.low.detach()
_BORROWED = holders(_HOLDER, "low")  # and of one that has an alias
del _ALIAS


def may_be_kept(weight: Any) -> bool:
    """Say whether a copy of ``weight`` can be trusted until one of the signs of a write shows."""
    return (
        type(weight) is torch.nn.Parameter
        and weight.is_leaf
        and weight.device.type == "cpu"
        and weight.layout is torch.strided
        and not weight.is_inference()
        and not weight.is_shared()
        and not getattr(weight, "_fsdp_flattened", False)
        and 0 < weight.numel() * weight.element_size() == weight.untyped_storage().nbytes()
    )
