"""Low-precision copies of parameters: each is cast once per update and read until the parameter is written.

Before: ``weight.bfloat16()`` at every forward. After: ``weight_copy(weight)``, which casts only if its copy is stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from amp_graph.passes.base import VerifyError
from amp_graph.passes.memory.gradient_buffers import GradientMemory
from amp_graph.passes.native.cast_kernel import copy_into, is_last
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import borrow
from amp_graph.passes.torch_compat.storage import address_of, bytes_of, storage_key
from amp_graph.passes.weights.cache_entry import (
    FREED,
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
from amp_graph.passes.weights.copy_lifetimes import Lifetimes
from amp_graph.passes.weights.finite_check import FiniteWeights
from amp_graph.passes.weights.foreach_casts import WeightGroup
from amp_graph.passes.weights.held_weights import HeldWeights
from amp_graph.passes.weights.packed_copies import PackedCopies, are_same
from amp_graph.passes.weights.update_tracking import UPDATES, hear_of_updates
from amp_graph.passes.weights.watched_memory import forget_addresses, watch_of

own_functions(__name__)

WeightCopy = Callable[..., Tensor]
FEW = 64  # copies: up to this many, scanning all of them is cheap
_MODELS = weakref.WeakSet["WeightCopies"]()  # of all converted models in this process


class WeightCopies(PackedCopies):
    """The copies of one model's parameters in ``dtype``; created and freed with the model's conversion.

    A copy is valid while the parameter's storage, address, strides and version counter are unchanged, and nobody has
    written to it, or obtained its memory, otherwise: kernels that bypass the counter report their writes
    (``weight_updates``), and accesses are noticed (``memory_access``). Only CPU parameters that own their whole storage
    get copies: others may write to shared memory and flat buffers (FSDP).

    ``when``: which copies outlive their last reader in backward; all of them without it (``copy_lifetimes.py``).
    ``found_held`` is told of a parameter that is cast at each call, and why: somebody may write its memory at any time.
    ``checked``: compare each copy with its parameter, bit by bit, at every read; raises VerifyError.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        found_held: Callable[[Tensor, str], None] | None = None,
        checked: bool = False,
        when: Lifetimes | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self._held = HeldWeights(found_held or (lambda weight, why: None))
        self.checked = checked
        self.when = when
        self._kept: dict[int, KeptCopy] = {}
        self.finite = FiniteWeights()
        self._room = FEW  # number of copies above which those of freed parameters are looked for
        self.read = self._reader()
        self.groups = weakref.WeakSet[WeightGroup]()  # weights on GPUs, which are cast together
        self.gradients = GradientMemory()  # besides weight copies: memory for gradients of embedding tables
        hear_of_updates()
        _MODELS.add(self)

    def drop(self, weights: Iterable[Tensor] = ()) -> int:
        """Forget every copy and return how many bytes they had; the next call makes them anew.

        weights: those whose address nobody has any more.
        """
        size = self.bytes + self.gradients.drop()
        for store in (self._kept, *self.packed):
            store.clear()  # the very object that graphs look into
        self.finite.drop()
        for group in self.groups:
            group.drop()
        forget_addresses(weights)
        return size

    @property
    def tensors(self) -> list[Tensor]:
        """The copies of the parameters that still exist."""
        self._purge()
        kept = [low for kept in self._all() for low in (kept.low, kept.held) if low is not None and low is not FREED]
        return kept + [low for group in self.groups for low in group.kept]

    def _all(self) -> list[KeptCopy]:
        return [kept for store in (self._kept, *self.packed) for kept in list(store.values())]

    def elements_of(self, params: Iterable[Tensor]) -> int:
        """Return how many elements of ``params`` have copies, which are cast anew."""
        return sum(p.numel() for p in params if id(p) in self._kept)

    @property
    def bytes(self) -> int:
        """The bytes that the copies take."""
        return sum(bytes_of(low) for low in self.tensors)

    def for_packing(self, weight: Tensor) -> tuple[Tensor, KeptCopy | None]:
        """Return ``weight`` in low precision, without gradient, and what to keep beside its packed form.

        None where no copy of such a weight is ever cached; it is then not packed. Where somebody may write the weight
        at any time, its packed form is reused only for a copy with the same bits: ``same_as_packed``.
        """
        kept = self._kept.get(id(weight))
        if kept is not None and is_current(kept, weight):
            return kept.low, kept
        self._look_for_freed()
        if not may_be_kept(weight):
            return self._cast(weight, False)[1], None
        signs = self._held.trusted_signs(weight)
        low = self._cast(weight, False)[1]
        return low, self._new(weight, low, signs) if type(low) is Tensor else None

    def _new(self, weight: Tensor, low: Tensor, signs: Signs) -> KeptCopy:
        watch = watch_of(weight)
        return KeptCopy(low, signs, watch, storage_key(weight), address_of(weight), weight.stride())

    def _reader(self) -> WeightCopy:
        """Return what graphs call: a named function that finds out in few steps whether a copy is current."""
        updates, grad_enabled, known = UPDATES, torch.is_grad_enabled, self._kept

        def weight_copy(
            weight: Tensor, once: bool = False, wide: bool = False, last: bool = False, bare: bool = False
        ) -> Tensor:
            """Return the copy; a new one is channels_last if ``last``.

            ``once``: the reader returns one gradient, which with ``wide`` is already fp32. ``bare``: without gradients,
            for a call that has some.
            """
            kept = known.get(id(weight))
            if kept is None:
                cast = self._first(weight, once, wide, last)
                if cast is not None:
                    return cast
                kept = known[id(weight)]
            version, mark, update = kept.signs
            now = kept.watch.mark
            is_old = mark is not now or update is not updates.mark
            if is_old and kept.passed is not now and is_passed_over(kept, weight) and (bare or grad_enabled()):
                return self._pass_over(weight, kept, now, wide)
            if (
                storage_key(weight) != kept.key  # first of all: the id may belong to another parameter by now
                or address_of(weight) != kept.pointer
                or weight.stride() != kept.stride
            ):
                cast = self._first(weight, once, wide, last)
                if cast is not None:
                    return cast
                kept = known[id(weight)]
            elif is_old or weight._version != version:
                cast = self._again(weight, kept, once, wide)
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
                    if self._ends_with_call(weight):
                        return self._for_this_call(weight, kept, kept.low, once, wide)
                    given = (borrow if wide else lend)(weight, kept.low)
                    if self.when is None or weight.numel() < LARGE:
                        kept.given = given  # a large gradient would wait: the engine runs nodes made earlier later
                return given if once else given.view_as(given)
            return kept.low

        return weight_copy

    def _ends_with_call(self, weight: Tensor) -> bool:
        """Say whether this call, which trains ``weight``, alone holds the copy: keeping it would add to the peak."""
        if self.when is None or weight.numel() < LARGE or not weight.requires_grad or not torch.is_grad_enabled():
            return False
        return not self.when.keeps(weight, weight.grad is not None)

    def _for_this_call(self, weight: Tensor, kept: KeptCopy, low: Tensor, once: bool, wide: bool) -> Tensor:
        """Return the copy ``low`` with a way back for gradients; the graph alone holds it, as long as it reads it."""
        self._kept[id(weight)] = kept.freed()
        self.forget_packed()  # training needs the memory, and makes it stale
        given = (borrow if wide else lend)(weight, low)
        return given if once else given.view_as(given)

    def _pass_over(self, weight: Tensor, kept: KeptCopy, now: object, wide: bool) -> Tensor:
        """Cast a small ``weight`` for this call alone, the first one after the update ``now``."""
        kept.passed = now
        if self.when is not None and not self.when.keeps(weight, False):
            self._kept[id(weight)] = kept.freed(now)
        return self._plain(weight, wide)

    def _plain(self, weight: Tensor, wide: bool) -> Tensor:
        """Cast ``weight`` for this call alone."""
        if wide and weight.requires_grad and torch.is_grad_enabled():
            return borrow(weight, weight.detach().to(self.dtype))
        return weight.to(self.dtype)

    def to_be_written(self, weight: Tensor) -> tuple[KeptCopy, Signs] | None:
        """Return the copy of ``weight`` if an update may write it too: same layout, and no other holder.

        Also returns what to pass to ``was_written``.
        """
        kept = self._kept.get(id(weight))
        if kept is not None and kept.is_freed and is_of(kept, weight) and not kept.is_last and self.when is not None:
            self.when.written = True  # from now on, updates write the copies: none is freed any more
            kept.low = torch.empty_like(weight, dtype=self.dtype, requires_grad=False)
        if kept is None or not is_of(kept, weight) or kept.low.stride() != weight.stride():
            return None
        signs = signs_of(weight, kept.watch)
        return (kept, signs) if is_nobody_elses(kept) and not kept.watch.why_not_free(weight) else None

    def was_written(self, weight: Tensor, kept: KeptCopy, before: Signs) -> None:
        """Record that the copy equals ``weight`` as it is now, after an update that is visible to the counters."""
        self._kept[id(weight)] = kept.again(kept.low, before._replace(version=weight._version))

    def _first(self, weight: Tensor, once: bool, wide: bool, last: bool) -> Tensor | None:
        """Cast ``weight`` as a plain cast does, and keep the result if it may be kept and adds nothing to the peak.

        Returns None where the kept copy is to be read.
        """
        if (old := self._kept.pop(id(weight), None)) is not None:
            old.given = None  # with its way back for gradients, which has the parameter's former shape
        if not may_be_kept(weight):
            return weight.to(self.dtype)
        self._look_for_freed()
        signs = self._held.trusted_signs(weight)  # before the values: a write in between invalidates the copy
        if signs.mark is None:
            return self._plain(weight, wide)
        ends = self._ends_with_call(weight)
        low, own = self._cast(weight, last, not ends)
        if type(own) is not Tensor:  # a tracing mode is active
            return low
        made = self._kept[id(weight)] = self._new(weight, own, signs)
        return self._for_this_call(weight, made, own, once, wide) if ends else low

    def _again(self, weight: Tensor, kept: KeptCopy, once: bool, wide: bool) -> Tensor | None:
        """Cast ``weight``, which was written to, as a plain cast does.

        Returns None where the copy is to be read instead: where the gradient arrives as fp32 (``wide``), which a cast's
        backward would cast twice; and where the cast was written into the old, large copy that nobody else holds. Fresh
        memory costs page faults: for 2 MiB, more than ten times as much as the cast.
        """
        if not weight.is_leaf:
            return self._first(weight, once, wide, False)
        signs = self._held.trusted_signs(weight)
        if signs.mark is None:
            return self._plain(weight, wide)
        ends = self._ends_with_call(weight)
        if weight.numel() >= LARGE and not kept.is_freed and is_nobody_elses(kept):
            with torch.no_grad():
                copy_into(kept.low, weight)
            low, own = None, kept.low
        else:
            low, own = self._cast(weight, kept.is_last or is_last(kept.low), not ends)
        if type(own) is not Tensor:  # a tracing mode is active
            return low
        made = self._kept[id(weight)] = kept.again(own, signs)
        if ends:
            return self._for_this_call(weight, made, own, once, wide)
        return None if wide else low

    def _cast(self, weight: Tensor, last: bool, history: bool = True) -> tuple[Tensor, Tensor]:
        """Return a plain cast of ``weight``, channels_last if asked, and the same without its autograd history."""
        layout = torch.channels_last if last else torch.preserve_format
        if torch.is_inference_mode_enabled():  # a tensor made in there cannot be saved for a backward outside
            with torch.inference_mode(False), torch.no_grad():
                low = weight.to(self.dtype, memory_format=layout)
        else:
            low = (weight if history else weight.detach()).to(self.dtype, memory_format=layout)
        return low, low.detach() if low.requires_grad else low

    def _look_for_freed(self) -> None:
        if not FEW < len(self._kept) < self._room:
            self._purge()

    def _purge(self) -> None:
        """Drop the copies of parameters that were freed or replaced."""
        for copies in (self._kept, *self.packed):
            for key, kept in list(copies.items()):
                kept.given = None  # which would keep the parameter alive
                if kept.watch.is_gone():
                    copies.pop(key, None)
        self._room = len(self._kept) * 5 // 4

    def check(self, weight: Tensor, low: Tensor, fresh: Tensor | None = None) -> None:
        """Raise VerifyError unless ``low`` equals ``weight`` as it is now, or what ``fresh`` makes of it."""
        with torch.no_grad():
            fresh = weight.detach().to(self.dtype) if fresh is None else fresh
        if not are_same(fresh, low):
            raise VerifyError(
                f"weight_copy: a parameter of shape {tuple(weight.shape)} was written, and nothing shows it: not its "
                "version counter, no access from Python to its memory, no optimizer's step\n"
                "  legal: writes under torch.no_grad() to the parameter itself\n"
                "  fix:   amp_graph.memory.drop_weight_copies(model) after the write, or "
                "policy='bf16,weight_copies=false'"
            )


def copies_of_models() -> list[WeightCopies]:
    """Return the copies of all converted models in this process."""
    return list(_MODELS)
