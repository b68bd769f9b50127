"""One low-precision copy of a parameter, and the signs by which a write to the parameter is detected.

Before: ``low = weight.bfloat16()``. After: ``KeptCopy(low, signs, ...)``, valid while the storage, address, strides and
version counter of ``weight`` are unchanged and nobody else has obtained its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_graph.passes.native import cast_kernel
from amp_graph.passes.torch_compat.autograd import borrow
from amp_graph.passes.torch_compat.dispatch import is_batched
from amp_graph.passes.torch_compat.storage import address_of, exchange_memory, holders, storage_key, storage_of
from amp_graph.passes.weights.update_tracking import UPDATES
from amp_graph.passes.weights.watched_memory import Watch

LARGE = 131_072  # elements: above this size, freed memory is returned to the system


class Signs(NamedTuple):
    """What a write to a parameter changes: its version counter, or one of the marks for writes without a counter."""

    version: int
    mark: object  # of its storage's ``Watch``; None, which never matches, where the memory may be written undetected
    update: object  # of ``UPDATES``


def signs_of(weight: Tensor, watch: Watch) -> Signs:
    """Return the current signs. Read them before the values: a write in between then invalidates the copy."""
    return Signs(weight._version, watch.mark, UPDATES.mark)


FREED = torch.empty(0)  # in place of a copy
NO_SIGNS = Signs(-1, None, None)  # which no parameter has


@dataclass(eq=False, slots=True)
class KeptCopy:
    """One copy and the parameter's state when it was made. Replaced as a whole, because threads read it."""

    low: Tensor
    signs: Signs
    watch: Watch
    # Of a storage that ``watch`` references weakly, so that no other storage reuses its identity and none is kept
    # alive.
    key: int | None
    pointer: int
    stride: tuple[int, ...]
    given: Tensor | None = None  # ``low`` with a way back for gradients; made when a call with gradients reads it
    reused: bool = False  # whether the copy was ever read
    passed: object = None  # the mark of an update after which no copy was made
    beside: Any = None  # what was made along with it
    held: Tensor | None = None  # what ``low`` was packed from, where each call has to compare that
    is_last: bool = False  # whether a copy that was freed was channels_last

    @property
    def is_freed(self) -> bool:
        """Whether the entry has no copy any more: no sign matches, so that the next read casts."""
        return self.low is FREED

    def freed(self, passed: object = None) -> KeptCopy:
        """Return the entry without its copy; ``passed``: the mark of an update after which no copy was made."""
        is_last = self.is_last or cast_kernel.is_last(self.low)
        nothing = KeptCopy(FREED, NO_SIGNS, self.watch, self.key, self.pointer, self.stride, is_last=is_last)
        nothing.passed = passed
        return nothing

    def again(self, low: Tensor, signs: Signs) -> KeptCopy:
        """Return the entry after the same parameter was cast anew, to ``low``."""
        given = self.given if low is self.low else None
        passed = self.passed is signs.mark
        return KeptCopy(low, signs, self.watch, self.key, self.pointer, self.stride, given, passed)


def is_passed_over(kept: KeptCopy, weight: Tensor) -> bool:
    """Say whether the first call after an update skips the copy: a small weight that is read once is not worth one."""
    return not kept.reused and weight.numel() < LARGE


def is_of(kept: KeptCopy, weight: Tensor) -> bool:
    """Say whether ``kept`` was made from ``weight``, and ``weight`` still has the same memory."""
    same = storage_key(weight) == kept.key  # first of all: the id may belong to another parameter by now
    return same and address_of(weight) == kept.pointer and weight.stride() == kept.stride


def is_current(kept: KeptCopy, weight: Tensor) -> bool:
    """Say whether ``kept`` is up to date: no sign of a write to ``weight`` has shown since it was made."""
    version, mark, update = kept.signs
    unwritten = mark is kept.watch.mark and update is UPDATES.mark
    return unwritten and is_of(kept, weight) and version == weight._version


def lend(weight: Tensor, low: Tensor) -> Tensor:
    """Return the copy ``low`` as a tensor whose gradient goes to ``weight``, as ``borrow`` does.

    The cast of a large gradient is compiled C, where there is a compiler, and the tensor that it returns is no view:
    autograd can add other gradients of ``weight`` to it in place.
    """
    of_places = weight.dim() == 4 and weight[0, 0].numel() > 1  # whose gradient may have another layout
    large = cast_kernel.LARGE_OF_PLACES if of_places else cast_kernel.LARGE
    if weight.numel() < large:
        return borrow(weight, low)
    found: Tensor = _Lent.apply(weight, [low])
    return found


class _Lent(torch.autograd.Function):
    """Saves nothing, so it serves any number of backward passes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: list[Tensor]) -> Tensor:
        ctx.weight = weight  # for its layout only
        given = low[0].new_empty(0)
        exchange_memory(given, low[0])  # not a view, and with a version counter of its own
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
    """Say whether no graph, alias or thread holds the copy, or the way back that was made for it."""
    if kept.given is None:
        return holders(kept, "low") == _ALONE
    return holders(kept, "low") == holders(kept, "given") == _BORROWED


_HOLDER = _Holder()
_ALONE = holders(_HOLDER, "low")  # reference count of a tensor that one attribute holds
_ALIAS = _HOLDER.low.detach()
_BORROWED = holders(_HOLDER, "low")  # and of one that has an alias
del _ALIAS


def may_be_kept(weight: Any) -> bool:
    """Say whether a copy of ``weight`` on the CPU can be trusted until a sign of a write shows."""
    return owns_its_memory(weight) and weight.device.type == "cpu" and not storage_of(weight).is_shared()


def owns_its_memory(weight: Any) -> bool:
    """Say whether ``weight`` is a parameter that has a whole storage."""
    return (
        type(weight) is torch.nn.Parameter
        and weight.is_leaf
        and weight.layout is torch.strided
        and not weight.is_inference()
        and not getattr(weight, "_fsdp_flattened", False)
        and 0 < weight.numel() * weight.element_size() == storage_of(weight).nbytes()
    )
