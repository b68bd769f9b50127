"""A dispatch mode that finds the operators which make infinities and NaN, and follows these to where they arrive.

Before: a NaN in a gradient. After: ``watch.origins_of(grad)``, the calls that made it of finite operands, oldest first.

Not every infinity is a fault: masks are filled with -inf, and a softmax ends them. What counts is where a value that
is not finite arrives, so each one carries the numbers of the calls that it comes from, by its storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.node_info import HALVES, is_mutable, is_random, is_view, schema_arguments, written_arguments
from amp_graph.passes.torch_compat.autograd import number_of_backward
from amp_graph.passes.torch_compat.dispatch import OpOverload, TorchDispatchMode
from amp_graph.passes.torch_compat.storage import StorageWeakRef, storage_key, storage_of

# They return memory that nothing has written yet.
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted")
# They write to their first argument and do not read it.
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "set_")
CASTS = ("_to_copy", "copy_", "_foreach_copy_")


@dataclass(frozen=True)
class Operand:
    """A tensor operand: dtype, shape, and the largest magnitude, before the call (inf and NaN if it has such)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: float


@dataclass(frozen=True)
class Event:
    """A call that made a value which is not finite, or a value that was given so (``operator`` is then "").

    ``place``: where it stands; ``source``: for a cast, where its value was computed, if a watched call did that; both
    as the run knows places. ``result``: the largest magnitude, inf or NaN. ``in_fp32``: that of the same
    call on the same operands in fp32; None where it was not rerun. ``meant``: a number that is not finite was an
    argument, or the given value has -inf alone, as masks do.
    """

    number: int
    operator: str
    place: Any
    backward: bool
    dtype: torch.dtype
    result: float
    operands: tuple[Operand, ...] = ()
    in_fp32: float | None = None
    meant: bool = False
    name: str = ""
    source: Any = None

    @property
    def is_lost_in_cast(self) -> bool:
        """Whether finite numbers, such as those of a mask, became infinite in the forward since a cast rounded them."""
        is_cast = any(f".{name}." in self.operator for name in CASTS)
        return is_cast and not self.backward and self.in_fp32 is not None and math.isfinite(self.in_fp32)


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude in ``tensor``, inf or NaN if it has such; 0.0 for what holds no such numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    try:
        if tensor.layout is not torch.strided:
            tensor = tensor.coalesce()._values() if tensor.layout is torch.sparse_coo else tensor.values()
        if tensor.itemsize < 2:  # 8 bits have no norm
            tensor = tensor.float()
        return float(torch.linalg.vector_norm(tensor, math.inf)) if tensor.numel() else 0.0
    except (RuntimeError, NotImplementedError):  # nested, quantized, of a subclass
        return 0.0


def is_bad(tensor: Tensor) -> bool:
    """Say whether ``tensor`` has an infinity or NaN."""
    return not math.isfinite(largest(tensor))


def has_nan(tensor: Tensor) -> bool:
    """Say whether ``tensor`` has a NaN."""
    return math.isnan(largest(tensor))


@dataclass(eq=False)
class _Watch:
    """What a ``Watch`` has found; ``place``: called for the place of a call, with whether it is in backward."""

    place: Callable[[bool], Any]
    events: list[Event] = field(default_factory=list)
    known: dict[int, tuple[StorageWeakRef, frozenset[int]]] = field(default_factory=dict)
    made_at: dict[int, tuple[StorageWeakRef, Any]] = field(default_factory=dict)  # places of all values, by storage


class Watch(TorchDispatchMode):
    """Checks the result of every operator that runs under it, in forward and backward.

    place: called at every event, with whether it is in backward; its result is stored in the event.
    """

    supports_higher_order_operators = True

    def __init__(self, place: Callable[[bool], Any], seen: Callable[[], None] | None = None) -> None:
        """Start without events; ``seen`` is called before each operator of the forward."""
        super().__init__()
        self._of, self._seen = _Watch(place), seen

    @property
    def events(self) -> list[Event]:
        """All events, in the order of execution."""
        return self._of.events

    # -- given values ---------------------------------------------------------------------------------

    def give(self, name: str, tensor: Tensor) -> None:
        """Check a value that the run is given: an input, a label, a parameter, a buffer."""
        found = largest(tensor)
        if math.isfinite(found):
            return
        with torch.no_grad():
            mask = not math.isnan(found) and not bool((tensor == math.inf).any()) if not tensor.is_complex() else False
        event = Event(len(self.events), "", None, False, tensor.dtype, found, meant=mask, name=name)
        self._add(event, [tensor])

    # -- calls ----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and record an event if it makes a value that is not finite."""
        kwargs = kwargs or {}
        backward = number_of_backward() >= 0
        if self._seen is not None and not backward:
            self._seen()
        known = isinstance(func, OpOverload)
        name = func._schema.name.rpartition("::")[2] if known else ""
        if name in UNWRITTEN or (known and is_view(func)):
            return func(*args, **kwargs)
        before, read = self._before(func, args, kwargs) if known and is_mutable(func) else ({}, None)
        result = func(*args, **kwargs)
        made = [*_tensors(result), *before.values()]
        bad = [t for t in made if is_bad(t)]
        if bad:
            self._follow(func, read or (args, kwargs), bad, backward)
        self._note(made, self._of.place(backward))
        return result

    def _note(self, made: list[Tensor], place: Any) -> None:
        """Note where values were computed."""
        for tensor in made:
            key = storage_key(tensor)
            if key is not None:
                self._of.made_at[key] = StorageWeakRef(storage_of(tensor)), place

    def _before(self, func: Any, args: Any, kwargs: Any) -> tuple[dict[int, Tensor], Any]:
        """Return the tensors that ``func`` will write, by id, and its arguments with copies of those that it reads."""
        given = schema_arguments(func, args, kwargs)
        written = {id(t): t for name in written_arguments(func) for t in _tensors(given.get(name))}
        outs = {id(t) for a in func._schema.arguments if a.is_out for t in _tensors(given.get(a.name))}
        if func._schema.name.rpartition("::")[2] in OVERWRITES:
            outs |= set(written)

        def kept(leaf: Any) -> Any:
            if id(leaf) in outs:
                return torch.zeros_like(leaf)
            return leaf.clone() if id(leaf) in written else leaf

        return written, (tree_map(kept, args), tree_map(kept, kwargs))

    def _follow(self, func: Any, given: Any, bad: list[Tensor], backward: bool) -> None:
        """Mark ``bad``, the results of a call, with the events that they come from: this one, or its operands'."""
        operands = [t for t in _tensors(given)]
        sources = [t for t in operands if is_bad(t)]
        origins = frozenset[int]().union(*map(self.origins_of, sources))
        new_nan = any(map(has_nan, bad)) and not any(map(has_nan, sources))
        only_meant = all(self.events[i].meant for i in origins)
        if sources and not (new_nan and only_meant):
            if origins:
                self._mark(bad, origins)
                return
            # An operand that no watched operator has made is the first to be seen: it is what there is to report.
        event = self._event(func, given, operands, bad, backward, inside=bool(sources))
        self._add(event, bad)

    def _event(self, func: Any, given: Any, operands: list[Tensor], bad: list[Tensor], backward: bool,
               inside: bool) -> Event:  # fmt: skip
        scalars = [leaf for leaf in tree_leaves(given) if isinstance(leaf, float)]
        meant = not inside and any(not math.isfinite(number) for number in scalars)
        told = tuple(Operand(t.dtype, tuple(t.shape), largest(t)) for t in operands if t.is_floating_point())
        first = bad[0]
        in_fp32 = None if inside else self._in_fp32(func, given)
        place, name = self._of.place(backward), str(func).removeprefix("aten.").partition(".")[0]
        source = _alive(self._of.made_at, operands[0]) if name in CASTS and operands else None
        how = (str(func), place, backward, first.dtype, largest(first), told, in_fp32, meant)
        return Event(len(self.events), *how, source=source)

    def _in_fp32(self, func: Any, given: Any) -> float | None:
        """Return the largest magnitude that ``func`` returns, or writes, for the same operands in fp32."""
        if not isinstance(func, OpOverload) or is_random(func):
            return None

        def widened(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype) and leaf in HALVES:
                return torch.float32
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach().float() if leaf.dtype in HALVES else leaf.detach().clone()

        args, kwargs = tree_map(widened, given)
        with Attempt() as tried:
            made = [t for t in _tensors(func(*args, **kwargs)) if t.is_floating_point()]
        if tried.error is not None:  # a kernel without fp32, or an argument that names a dtype otherwise
            return None
        found = [largest(t) for t in (made or _tensors(args))]
        bad = [f for f in found if not math.isfinite(f)]
        return bad[0] if bad else max(found, default=None)

    # -- where values come from --------------------------------------------------------------------------

    def _add(self, event: Event, tensors: list[Tensor]) -> None:
        self.events.append(event)
        self._mark(tensors, frozenset((event.number,)))

    def _mark(self, tensors: list[Tensor], origins: frozenset[int]) -> None:
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None:
                self._of.known[key] = StorageWeakRef(storage_of(tensor)), origins

    def origins_of(self, tensor: Tensor) -> frozenset[int]:
        """Return the numbers of the events that a value which is not finite comes from; empty: unknown."""
        return _alive(self._of.known, tensor) or frozenset()


def _alive(noted: dict[int, tuple[StorageWeakRef, Any]], tensor: Tensor) -> Any:
    """Return what was noted for the storage of ``tensor``; None if that was another's, which is gone."""
    key = storage_key(tensor)
    found = None if key is None else noted.get(key)
    return None if found is None or found[0].expired() else found[1]


def _tensors(found: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
