"""Low-precision copies of parameters, each made once an update and read until something writes the parameter.

Before: ``weight.bfloat16()`` at every forward. After: ``weight_copy(weight)``, which casts only where its copy is old.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.base import VerifyError
from amp_graph.passes.cast_kernel import copy_into, is_last
from amp_graph.passes.finite_values import FiniteWeights
from amp_graph.passes.frozen_weights import FrozenWeights
from amp_graph.passes.gradient_memory import GradientMemory
from amp_graph.passes.kept_copy import LARGE, KeptCopy, is_nobody_elses, is_of, is_passed_over, lend, may_be_kept
from amp_graph.passes.large_pages import LargeResults
from amp_graph.passes.torch_private import StorageWeakRef, borrow, bytes_of, storage_key, words_of
from amp_graph.passes.weight_groups import WeightGroup
from amp_graph.passes.weight_updates import SHOWN, UPDATES, hear_of_updates

WeightCopy = Callable[..., Tensor]
PACKED, TRANSPOSED, PANELS, TRANSPOSED_PANELS, FOLDED, PARTS = STORES = range(6)
PLAIN_READS = 2  # of a copy in graphs without gradients; then it pays to pack it, which costs several products
FEW = 64  # copies: up to so many, looking at all of them costs next to nothing
_MODELS = weakref.WeakSet["WeightCopies"]()  # of all converted models in this process


class WeightCopies:
    """The copies of one model's parameters in ``dtype``; lives and dies with the model's conversion.

    A copy is read as long as the parameter has the same storage, address, strides and version counter, some words
    spread over it are what they were, and no optimizer has stepped since, but for frozen weights (``FrozenWeights``).
    Only parameters in the memory of the CPU whose whole storage is theirs have copies: shared memory and flat buffers
    (FSDP) are written by others.

    ``found_written`` hears of a parameter whose words changed without a trace (a write to ``.data``, ``numpy``,
    another process): every parameter is cast at each call from then on, until ``drop``.
    ``checked``: compare each copy with its parameter, bit by bit, whenever it is read; raises VerifyError.
    """

    def __init__(
        self, dtype: torch.dtype, found_written: Callable[[Tensor], None] | None = None, checked: bool = False
    ) -> None:
        self.dtype = dtype
        self.enabled = True
        self._found_written = found_written or (lambda weight: None)
        self.checked = checked
        self._kept: dict[int, KeptCopy] = {}
        # What graphs without gradients read instead: see packed_weights.py, folded_norms.py, widened_products.py.
        self.packed: tuple[dict[Any, KeptCopy], ...] = tuple({} for _ in STORES)
        self.finite = FiniteWeights()
        self.frozen = FrozenWeights(self._kept)
        self._room = FEW  # how many copies there may be before those of freed parameters are looked for
        self.read = self._reader()
        self.groups = weakref.WeakSet[WeightGroup]()  # of weights on devices where no copy can be trusted
        self.gradients = GradientMemory()  # beside copies of weights, memory for gradients of tables
        self.results = LargeResults()  # and for large results of calls without gradients
        hear_of_updates()
        _MODELS.add(self)

    def drop(self) -> int:
        """Forget every copy and return how many bytes they had; the next call makes them anew."""
        size = self.bytes + self.gradients.drop() + self.results.drop()
        self._forget(enabled=True)
        return size

    def _forget(self, enabled: bool) -> None:
        self.enabled = enabled
        for store in (self._kept, *self.packed):
            store.clear()  # the very object that graphs look into
        self.finite.drop()
        for group in self.groups:
            group.drop()

    @property
    def tensors(self) -> list[Tensor]:
        """The copies of parameters that are still there."""
        self._purge()
        return [kept.low for kept in self._all()] + [low for group in self.groups for low in group.kept]

    def _all(self) -> list[KeptCopy]:
        return [kept for store in (self._kept, *self.packed) for kept in list(store.values())]

    def elements_of(self, params: Iterable[Tensor]) -> int:
        """Return how many elements of ``params`` have copies that are cast anew."""
        return sum(p.numel() for p in params if id(p) in self._kept)

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return sum(bytes_of(low) for low in self.tensors)

    def is_current(self, weight: Tensor, kept: KeptCopy) -> bool:
        """Say whether ``kept`` is of ``weight`` as it is now. A write without a trace is told to who asked for it."""
        if not is_of(kept, weight) or weight._version != kept.version:
            return False
        if kept.mark not in (UPDATES.mark, SHOWN):
            return self.frozen.stays(kept, weight)
        if kept.words.tobytes() != kept.values:
            self._written_in_secret(weight)
            return False
        return True

    def for_packing(self, weight: Tensor) -> tuple[Tensor, KeptCopy | None]:
        """Return ``weight`` in low precision, without gradient; and its copy, if that has been read often enough."""
        kept = self._kept.get(id(weight))
        if kept is None or not self.is_current(weight, kept):
            low = self.read(weight)
            kept = self._kept.get(id(weight))
            if kept is None:
                return low, None
            kept.for_packing = True
        kept.asked += 1
        return kept.low, kept if kept.asked > PLAIN_READS else None

    def keep_packed(
        self, weight: Tensor, kept: KeptCopy, packed: Tensor, store: int, key: Any = None, beside: Any = None
    ) -> KeptCopy:
        """Keep what was made of the copy ``kept``, and the copy itself where something else reads it."""
        made = kept.again(packed, kept.version, kept.mark)
        made.beside, made.proven = beside, kept.proven
        self.packed[store][key or id(weight)] = made
        if kept.for_packing and not kept.reused:
            self._kept.pop(id(weight), None)
        return made

    def _reader(self) -> WeightCopy:
        """Return what graphs call: a function with a name, and as few steps as it takes to know a copy is current."""
        updates, grad_enabled, known, frozen = UPDATES, torch.is_grad_enabled, self._kept, self.frozen
        lowered = torch.Tensor.bfloat16 if self.dtype == torch.bfloat16 else torch.Tensor.half

        def weight_copy(
            weight: Tensor, once: bool = False, wide: bool = False, last: bool = False, bare: bool = False
        ) -> Tensor:
            """Return the copy, a new one channels_last where it is ``last``.

            ``once``: to who hands back one gradient, which with ``wide`` is fp32 already. ``bare``: without gradients,
            for a call that has some.
            """
            kept = known.get(id(weight))
            if kept is None:
                return self._first(weight, last)
            mark = SHOWN if kept.mark is SHOWN else updates.mark
            if (
                kept.mark is not mark
                and not frozen.stays(kept, weight)
                and kept.passed is not mark
                and is_passed_over(kept, weight)
                and not frozen.may_stay(weight, kept.mark)
                and (bare or grad_enabled())
            ):
                kept.passed = mark
                if wide and weight.requires_grad and grad_enabled():
                    return borrow(weight, lowered(weight.detach()))
                return lowered(weight)
            if (
                storage_key(weight) != kept.key  # before all else: an id may be another parameter's by now
                or weight.data_ptr() != kept.pointer
                or weight.stride() != kept.stride
            ):
                return self._first(weight, last)
            if weight._version != kept.version or mark is not kept.mark:
                cast = self._again(weight, kept, wide)
                if cast is not None:
                    return cast
                kept = known[id(weight)]
            elif kept.words.tobytes() != kept.values:
                return self._written_in_secret(weight)
            else:
                kept.reused = True
            if self.checked:
                self.check(weight, kept.low)
            if weight.requires_grad and grad_enabled():
                given = kept.given
                if given is None:
                    given = kept.given = (borrow if wide else lend)(weight, kept.low)
                return given if once else given.view_as(given)
            return kept.low

        return weight_copy

    def to_be_written(self, weight: Tensor) -> KeptCopy | None:
        """Return the copy of ``weight`` where an update may write it along: it lies alike, and nobody else has it."""
        kept = self._kept.get(id(weight))
        if kept is None or not is_of(kept, weight) or kept.low.stride() != weight.stride():
            return None
        return kept if is_nobody_elses(kept) else None

    def was_written(self, weight: Tensor, kept: KeptCopy, shows: bool) -> None:
        """Take note that the copy is ``weight`` as it is now; ``shows``: any later write shows in its version."""
        self._kept[id(weight)] = kept.again(kept.low, weight._version, SHOWN if shows else UPDATES.mark)

    def _first(self, weight: Tensor, last: bool = False) -> Tensor:
        """Cast ``weight`` as a plain cast does, and keep the result if it may be kept."""
        if (old := self._kept.pop(id(weight), None)) is not None:
            old.given = None  # with its way back for gradients, whose shape is the one that the parameter had
        if not self.enabled or not may_be_kept(weight):
            return weight.to(self.dtype)
        if not FEW < len(self._kept) < self._room:
            self._purge()
        version, mark = weight._version, UPDATES.mark  # before the values: a write in between makes the copy old
        low, own = self._cast(weight, last)
        if type(own) is Tensor:  # not where a mode that traces is at work
            storage, words = StorageWeakRef(weight.untyped_storage()), words_of(weight)
            place = (storage.cdata, weight.data_ptr(), weight.stride())
            self._kept[id(weight)] = KeptCopy(own, version, mark, storage, *place, words, words.tobytes())
        return low

    def _again(self, weight: Tensor, kept: KeptCopy, wide: bool) -> Tensor | None:
        """Cast ``weight``, which was written to, as a plain cast does.

        Returns None where the copy is to be read instead: where the gradient comes ``wide``, which a cast's would be
        cast twice; and where it went into the old copy, which is large and nobody has any more: fresh memory costs page
        faults, for 2 MiB more than ten times what the cast does.
        """
        if not weight.is_leaf:
            return self._first(weight)
        version, mark = weight._version, UPDATES.mark
        may_have_stayed = version == kept.version and self.frozen.may_stay(weight, kept.mark)
        if weight.numel() >= LARGE and not may_have_stayed and is_nobody_elses(kept):
            with torch.no_grad():
                copy_into(kept.low, weight)
            low, own = None, kept.low
        else:
            low, own = self._cast(weight, is_last(kept.low))
        if type(own) is not Tensor:  # a mode that traces is at work
            return low
        made = self._kept[id(weight)] = kept.again(own, version, mark)
        if may_have_stayed:
            self.frozen.compare(kept, made)
        return None if wide else low

    def _cast(self, weight: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Return a plain cast of ``weight``, channels_last where asked, and the same without its autograd history."""
        layout = torch.channels_last if last else torch.preserve_format
        if torch.is_inference_mode_enabled():  # what is made in there cannot be saved for a backward outside
            with torch.inference_mode(False), torch.no_grad():
                low = weight.to(self.dtype, memory_format=layout)
        else:
            low = weight.to(self.dtype, memory_format=layout)
        return low, low.detach() if low.requires_grad else low

    def _purge(self) -> None:
        """Let go of the copies of parameters that were freed or replaced."""
        for copies in (self._kept, *self.packed):
            for key, kept in list(copies.items()):
                kept.given = None  # which would hold the parameter
                if kept.storage.expired():
                    copies.pop(key, None)
        self._room = len(self._kept) * 5 // 4

    def _written_in_secret(self, weight: Tensor) -> Tensor:
        self._forget(enabled=False)
        self._found_written(weight)
        return weight.to(self.dtype)

    def check(self, weight: Tensor, low: Tensor, fresh: Tensor | None = None) -> None:
        """Raise VerifyError unless ``low`` is ``weight`` as it is now, or what is made ``fresh`` of it."""
        with torch.no_grad():
            fresh = weight.detach().to(self.dtype) if fresh is None else fresh
        if not torch.equal(fresh.contiguous().view(torch.int16), low.contiguous().view(torch.int16)):
            raise VerifyError(
                f"weight_copy: a parameter of shape {tuple(weight.shape)} was written, and neither its version counter "
                "nor an optimizer's step shows it\n"
                "  legal: writes under torch.no_grad() to the parameter itself, not to its .data\n"
                "  fix:   amp_graph.drop_weight_copies(model) after the write, or policy='bf16,weight_copies=false'"
            )


def copies_of_models() -> list[WeightCopies]:
    """Return the copies of all converted models in this process."""
    return list(_MODELS)
