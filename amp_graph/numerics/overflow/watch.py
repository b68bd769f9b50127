"""A dispatch mode that finds the operators which make infinities and NaN, and follows these to where they arrive.

Before: a NaN in a gradient. After: ``watch.origins_of(grad)``, the calls that made it of finite operands, oldest first.

Not every infinity is a fault: masks are filled with -inf, and a softmax ends them. What counts is where a value that
is not finite arrives, so each one carries the numbers of the calls that it comes from, by its storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.lists.errors import Attempt
from amp_graph.numerics.exact_runs import in_full
from amp_graph.numerics.overflow.places import CodePlaces, GraphPlaces
from amp_graph.numerics.overflow.result import Located, dtype_text, number_text
from amp_graph.passes.graph.node_info import is_mutable, is_random, is_view, schema_arguments, written_arguments
from amp_graph.passes.torch_compat.autograd import in_backward
from amp_graph.passes.torch_compat.dispatch import OpOverload, TorchDispatchMode
from amp_graph.passes.torch_compat.storage import Memory

# They return memory that nothing has written yet.
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted")
# They write to their first argument and do not read it.
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "set_")
CASTS = ("_to_copy", "copy_", "_foreach_copy_")


def is_lost_in_cast(facts: Located) -> bool:
    """Say whether finite numbers, as of a mask, became infinite in the forward since a cast rounded them."""
    was_finite = facts.direction == "forward" and facts.is_finite_in_fp32
    return was_finite and any(f".{name}." in facts.operator for name in CASTS)


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


class Watch(TorchDispatchMode):
    """Checks the result of every operator that runs under it, in forward and backward.

    ``events``: the calls that made a value which is not finite, and the values that were given so, in their order: what
    is known of each; and whether it was meant: a number that is not finite was an argument, or the given value has -inf
    alone, as masks do.
    """

    supports_higher_order_operators = True

    def __init__(self, places: CodePlaces | GraphPlaces, seen: Callable[[], None] | None = None) -> None:
        """Start without events; ``seen`` is called before each operator of the forward."""
        super().__init__()
        self.events: list[tuple[Located, bool]] = []
        self._places: Any = places  # each kind tells its own places alone
        self._seen = seen
        self._origins = Memory[frozenset[int]]()
        self._made_at = Memory[Any]()  # places of all values

    # -- given values ---------------------------------------------------------------------------------

    def give(self, name: str, tensor: Tensor) -> None:
        """Check a value that the run is given: an input, a label, a parameter, a buffer."""
        found = largest(tensor)
        if math.isfinite(found):
            return
        with torch.no_grad():
            mask = not math.isnan(found) and not bool((tensor == math.inf).any()) if not tensor.is_complex() else False
        facts = Located(given=name, dtype=dtype_text(tensor.dtype), result=number_text(found))
        self._add(facts, [tensor], meant=mask)

    # -- calls ----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and record an event if it makes a value that is not finite."""
        kwargs = kwargs or {}
        backward = in_backward()
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
            self._follow(func, read or (args, kwargs), bad, backward=backward)
        place = self._places.now(backward=backward)
        for t in made:
            self._made_at.keep(t, place)
        return result

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

    def _follow(self, func: Any, given: Any, bad: list[Tensor], *, backward: bool) -> None:
        """Mark ``bad``, the results of a call, with the events that they come from: this one, or its operands'."""
        operands = list(_tensors(given))
        sources = [t for t in operands if is_bad(t)]
        origins = frozenset[int]().union(*map(self.origins_of, sources))
        new_nan = any(math.isnan(largest(t)) for t in bad) and not any(math.isnan(largest(t)) for t in sources)
        if sources and not (new_nan and all(self.events[i][1] for i in origins)):
            if origins:
                for t in bad:
                    self._origins.keep(t, origins)
                return
            # An operand that no watched operator has made is the first to be seen: it is what there is to report.
        scalars = (leaf for leaf in tree_leaves(given) if isinstance(leaf, float))
        meant = not sources and not all(map(math.isfinite, scalars))
        self._add(self._facts(func, given, operands, bad[0], backward=backward, rerun=not sources), bad, meant=meant)

    def _facts(
        self, func: Any, given: Any, operands: list[Tensor], bad: Tensor, *, backward: bool, rerun: bool
    ) -> Located:
        """Return what is known of a call; ``rerun``: whether to call it once more, in fp32."""
        is_cast = str(func).removeprefix("aten.").partition(".")[0] in CASTS
        source = self._made_at.known(operands[0]) if is_cast and operands else None
        floats = [t for t in operands if t.is_floating_point()]
        return replace(
            self._places.told(self._places.now(backward=backward), source, backward=backward),
            direction="backward" if backward else "forward",
            operator=str(func),
            dtype=dtype_text(bad.dtype),
            result=number_text(largest(bad)),
            limit=float(torch.finfo(bad.dtype).max) if bad.dtype.is_floating_point else None,
            operands=tuple((dtype_text(t.dtype), tuple(t.shape), largest(t)) for t in floats),
            in_fp32=self._in_fp32(func, given) if rerun else None,
        )

    def _in_fp32(self, func: Any, given: Any) -> float | None:
        """Return the largest magnitude that ``func`` returns, or writes, for the same operands in fp32."""
        if not isinstance(func, OpOverload) or is_random(func):
            return None

        args, kwargs = tree_map(in_full, given)
        with Attempt() as tried:
            made = [t for t in _tensors(func(*args, **kwargs)) if t.is_floating_point()]
        if tried.error is not None:  # a kernel without fp32, or an argument that names a dtype otherwise
            return None
        found = [largest(t) for t in (made or _tensors(args))]
        bad = [f for f in found if not math.isfinite(f)]
        return bad[0] if bad else max(found, default=None)

    # -- where values come from --------------------------------------------------------------------------

    def _add(self, facts: Located, tensors: list[Tensor], *, meant: bool) -> None:
        for t in tensors:
            self._origins.keep(t, frozenset((len(self.events),)))
        self.events.append((facts, meant))

    def origins_of(self, tensor: Tensor) -> frozenset[int]:
        """Return the numbers of the events that a value which is not finite comes from; empty: unknown."""
        return self._origins.known(tensor) or frozenset()


def _tensors(found: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
