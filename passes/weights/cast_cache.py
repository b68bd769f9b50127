"""Low-precision copies of parameters, each made once an update and read until something writes the parameter.

Before: ``weight.bfloat16()`` at every forward. After: ``weight_copy(weight)``, which casts only where its copy is old.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.base import VerifyError
from amp_graph.passes.memory.gradient_buffers import GradientMemory
from amp_graph.passes.memory.huge_pages import LargeResults
from amp_graph.passes.native.cast_kernel import copy_into, is_last
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import borrow
from amp_graph.passes.torch_compat.dynamo_capture import a_capture_runs
from amp_graph.passes.torch_compat.storage import address_of, bytes_of, storage_key
from amp_graph.passes.weights.cache_entry import (
    LARGE,
    KeptCopy,
    Signs,
    is_current,
    is_nobody_elses,
    is_of,
    is_passed_over,
    lend,
    may_be_kept,
    signs_of,
)
from amp_graph.passes.weights.finite_check import FiniteWeights
from amp_graph.passes.weights.foreach_casts import WeightGroup
from amp_graph.passes.weights.update_tracking import UPDATES, hear_of_updates
from amp_graph.passes.weights.watched_memory import ADDRESS, forget_addresses, watch_of

own_functions(__name__)

WeightCopy = Callable[..., Tensor]
PACKED, TRANSPOSED, PANELS, TRANSPOSED_PANELS, FOLDED, PARTS = STORES = range(6)
COMPARED = (PACKED, TRANSPOSED, PANELS, TRANSPOSED_PANELS)  # where what is packed is kept for a copy with the same bits
FOR_GOOD = 8  # calls in a row, while no thread captures: that has each weight's memory for a moment
FEW = 64  # copies: up to so many, looking at all of them costs next to nothing
_MODELS = weakref.WeakSet["WeightCopies"]()  # of all converted models in this process


class WeightCopies:
    """The copies of one model's parameters in ``dtype``; lives and dies with the model's conversion.

    A copy is read as long as the parameter has the same storage, address, strides and version counter, and nobody has
    written to it, or got its memory, otherwise: kernels that move no counter say so (``weight_updates``), accesses are
    noticed (``memory_access``). Only parameters in the memory of the CPU whose whole storage is theirs have copies:
    shared memory and flat buffers (FSDP) are written by others.

    ``found_held`` hears of a parameter that is cast at each call, and why: somebody may write its memory at any time.
    ``checked``: compare each copy with its parameter, bit by bit, whenever it is read; raises VerifyError.
    """

    def __init__(
        self, dtype: torch.dtype, found_held: Callable[[Tensor, str], None] | None = None, checked: bool = False
    ) -> None:
        self.dtype = dtype
        self._found_held = found_held or (lambda weight, why: None)
        self.checked = checked
        self._kept: dict[int, KeptCopy] = {}
        self._has_collected = False  # whether garbage was collected in search of who holds a parameter
        self._held: dict[int, tuple[str, int]] = {}  # such a reason, and for how many calls in a row, by id
        # What graphs without gradients read instead: see prepacked_linear.py, folded_conv.py, chunked_linear.py.
        self.packed: tuple[dict[Any, KeptCopy], ...] = tuple({} for _ in STORES)
        self.finite = FiniteWeights()
        self._room = FEW  # how many copies there may be before those of freed parameters are looked for
        self.read = self._reader()
        self.groups = weakref.WeakSet[WeightGroup]()  # of weights on devices where no copy can be trusted
        self.gradients = GradientMemory()  # beside copies of weights, memory for gradients of tables
        self.results = LargeResults()  # and for large results of calls without gradients
        hear_of_updates()
        _MODELS.add(self)

    def drop(self, weights: Iterable[Tensor] = ()) -> int:
        """Forget every copy and return how many bytes they had; the next call makes them anew.

        weights: of which nobody has an address any more.
        """
        size = self.bytes + self.gradients.drop() + self.results.drop()
        for store in (self._kept, *self.packed):
            store.clear()  # the very object that graphs look into
        self.finite.drop()
        for group in self.groups:
            group.drop()
        forget_addresses(weights)
        return size

    @property
    def tensors(self) -> list[Tensor]:
        """The copies of parameters that are still there."""
        self._purge()
        kept = [low for kept in self._all() for low in (kept.low, kept.held) if low is not None]
        return kept + [low for group in self.groups for low in group.kept]

    def _all(self) -> list[KeptCopy]:
        return [kept for store in (self._kept, *self.packed) for kept in list(store.values())]

    def elements_of(self, params: Iterable[Tensor]) -> int:
        """Return how many elements of ``params`` have copies that are cast anew."""
        return sum(p.numel() for p in params if id(p) in self._kept)

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return sum(bytes_of(low) for low in self.tensors)

    def for_packing(self, weight: Tensor) -> tuple[Tensor, KeptCopy | None]:
        """Return ``weight`` in low precision, without gradient; and what to keep beside what is packed of that.

        None where nothing is ever kept of such a weight, which then is not packed. Where somebody may write it at any
        time, what is packed is not read again but for a copy with the same bits: ``same_as_packed``.
        """
        kept = self._kept.get(id(weight))
        if kept is not None and is_current(kept, weight):
            return kept.low, kept
        self._look_for_freed()
        if not may_be_kept(weight):
            return self._cast(weight, False)[1], None
        signs = self._trusted_signs(weight)
        low = self._cast(weight, False)[1]
        return low, self._new(weight, low, signs) if type(low) is Tensor else None

    def keep_packed(
        self, weight: Tensor, made_of: KeptCopy, packed: Tensor, store: int, key: Any = None, beside: Any = None
    ) -> KeptCopy:
        """Keep what was packed of a copy that ``for_packing`` returned; that copy goes, unless others read it."""
        made = made_of.again(packed, made_of.signs)
        made.beside = beside
        if made.signs.mark is None:
            made.held = made_of.low
        if made.held is None or store in COMPARED:
            self.packed[store][key or id(weight)] = made
        return made

    def same_as_packed(self, weight: Tensor, made_of: KeptCopy, packed: KeptCopy | None) -> bool:
        """Say whether ``packed`` is of the very bits of ``made_of``, a copy of memory that may be written unseen."""
        if packed is None or packed.held is None or not is_of(packed, weight):
            return False
        return _are_same(packed.held, made_of.low)

    def _trusted_signs(self, weight: Tensor) -> Signs:
        """Return what shows any write to ``weight`` from now on.

        With no mark, so that no copy of it is current, where some write would not show, which is told.
        """
        watch = watch_of(weight)
        signs = signs_of(weight, watch)
        why = watch.why_not_free(weight)
        if not why:
            self._held.pop(id(weight), None)
            return signs
        before, calls = self._held.get(id(weight), ("", 0))
        calls = calls + (not a_capture_runs()) if before == why else 1
        if calls == FOR_GOOD and not self._has_collected:  # what a capture leaves behind has aliases, in cycles
            self._has_collected = True
            self._held[id(weight)] = why, calls - 1
            gc.collect()
            return self._trusted_signs(weight)
        self._held[id(weight)] = why, calls
        if calls == (1 if why == ADDRESS else FOR_GOOD):
            self._found_held(weight, why)
        return signs._replace(mark=None)

    def _new(self, weight: Tensor, low: Tensor, signs: Signs) -> KeptCopy:
        watch = watch_of(weight)
        return KeptCopy(low, signs, watch, storage_key(weight), address_of(weight), weight.stride())

    def _reader(self) -> WeightCopy:
        """Return what graphs call: a function with a name, and as few steps as it takes to know a copy is current."""
        updates, grad_enabled, known = UPDATES, torch.is_grad_enabled, self._kept

        def weight_copy(
            weight: Tensor, once: bool = False, wide: bool = False, last: bool = False, bare: bool = False
        ) -> Tensor:
            """Return the copy, a new one channels_last where it is ``last``.

            ``once``: to who hands back one gradient, which with ``wide`` is fp32 already. ``bare``: without gradients,
            for a call that has some.
            """
            kept = known.get(id(weight))
            if kept is None:
                return self._first(weight, wide, last)
            version, mark, update = kept.signs
            now = kept.watch.mark
            is_old = mark is not now or update is not updates.mark
            if is_old and kept.passed is not now and is_passed_over(kept, weight) and (bare or grad_enabled()):
                kept.passed = now
                return self._plain(weight, wide)
            if (
                storage_key(weight) != kept.key  # before all else: an id may be another parameter's by now
                or address_of(weight) != kept.pointer
                or weight.stride() != kept.stride
            ):
                return self._first(weight, wide, last)
            if is_old or weight._version != version:
                cast = self._again(weight, kept, wide)
                if cast is not None:
                    return cast
                kept = known[id(weight)]
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

    def _plain(self, weight: Tensor, wide: bool) -> Tensor:
        """Cast ``weight`` for this call alone."""
        if wide and weight.requires_grad and torch.is_grad_enabled():
            return borrow(weight, weight.detach().to(self.dtype))
        return weight.to(self.dtype)

    def to_be_written(self, weight: Tensor) -> tuple[KeptCopy, Signs] | None:
        """Return the copy of ``weight`` where an update may write it along: it lies alike, and nobody else has it.

        And what is to be handed to ``was_written``.
        """
        kept = self._kept.get(id(weight))
        if kept is None or not is_of(kept, weight) or kept.low.stride() != weight.stride():
            return None
        signs = signs_of(weight, kept.watch)
        return (kept, signs) if is_nobody_elses(kept) and not kept.watch.why_not_free(weight) else None

    def was_written(self, weight: Tensor, kept: KeptCopy, before: Signs) -> None:
        """Take note that the copy is ``weight`` as it is now, which an update has written with a trace."""
        self._kept[id(weight)] = kept.again(kept.low, before._replace(version=weight._version))

    def _first(self, weight: Tensor, wide: bool = False, last: bool = False) -> Tensor:
        """Cast ``weight`` as a plain cast does, and keep the result if it may be kept."""
        if (old := self._kept.pop(id(weight), None)) is not None:
            old.given = None  # with its way back for gradients, whose shape is the one that the parameter had
        if not may_be_kept(weight):
            return weight.to(self.dtype)
        self._look_for_freed()
        signs = self._trusted_signs(weight)  # before the values: a write in between makes the copy old
        if signs.mark is None:
            return self._plain(weight, wide)
        low, own = self._cast(weight, last)
        if type(own) is Tensor:  # not where a mode that traces is at work
            self._kept[id(weight)] = self._new(weight, own, signs)
        return low

    def _again(self, weight: Tensor, kept: KeptCopy, wide: bool) -> Tensor | None:
        """Cast ``weight``, which was written to, as a plain cast does.

        Returns None where the copy is to be read instead: where the gradient comes ``wide``, which a cast's would be
        cast twice; and where it went into the old copy, which is large and nobody has any more: fresh memory costs page
        faults, for 2 MiB more than ten times what the cast does.
        """
        if not weight.is_leaf:
            return self._first(weight)
        signs = self._trusted_signs(weight)
        if signs.mark is None:
            return self._plain(weight, wide)
        if weight.numel() >= LARGE and is_nobody_elses(kept):
            with torch.no_grad():
                copy_into(kept.low, weight)
            low, own = None, kept.low
        else:
            low, own = self._cast(weight, is_last(kept.low))
        if type(own) is not Tensor:  # a mode that traces is at work
            return low
        self._kept[id(weight)] = kept.again(own, signs)
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

    def _look_for_freed(self) -> None:
        if not FEW < len(self._kept) < self._room:
            self._purge()

    def _purge(self) -> None:
        """Let go of the copies of parameters that were freed or replaced."""
        for copies in (self._kept, *self.packed):
            for key, kept in list(copies.items()):
                kept.given = None  # which would hold the parameter
                if kept.watch.is_gone():
                    copies.pop(key, None)
        self._room = len(self._kept) * 5 // 4

    def check(self, weight: Tensor, low: Tensor, fresh: Tensor | None = None) -> None:
        """Raise VerifyError unless ``low`` is ``weight`` as it is now, or what is made ``fresh`` of it."""
        with torch.no_grad():
            fresh = weight.detach().to(self.dtype) if fresh is None else fresh
        if not _are_same(fresh, low):
            raise VerifyError(
                f"weight_copy: a parameter of shape {tuple(weight.shape)} was written, and nothing shows it: not its "
                "version counter, no access from Python to its memory, no optimizer's step\n"
                "  legal: writes under torch.no_grad() to the parameter itself\n"
                "  fix:   amp_graph.memory.drop_weight_copies(model) after the write, or "
                "policy='bf16,weight_copies=false'"
            )


def _are_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def copies_of_models() -> list[WeightCopies]:
    """Return the copies of all converted models in this process."""
    return list(_MODELS)
