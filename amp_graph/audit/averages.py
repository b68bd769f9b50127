"""AMP303: averages of weights that lose their updates, in whatever form they are written.

Before: ``ema.lerp_(p, 0.001)``, or ``ema.copy_(0.999 * ema + 0.001 * p)``, of tensors in bfloat16. After: "97 % of the
elements of an average in bfloat16 stay as they are where it should move".

Elementwise operations are computed once more, on samples in float64, each from the result of the one before. An average
is what is written to the memory that it was computed from, with weights that add up to 1: of the 1 that is appended to
each sample it makes 1 again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from amp_graph.audit.codes import finding
from amp_graph.audit.records import Call, Finding, Place, Watcher, dtype_name, tensors_in
from amp_graph.audit.samples import sample
from amp_graph.audit.updates import MANY, Lost
from amp_graph.passes.graph.node_info import HALVES, is_mutable, is_random
from amp_graph.passes.torch_compat.storage import Memory, storage_key

MOST = 1 << 12  # elements of a sample
ROUNDED = 1e-6  # by how much a sum of weights that are in float32 may differ from 1
MOST_FOLLOWED = 1 << 10  # beyond which those whose memory is gone are dropped
COPIES = ("aten.copy_.default", "aten._to_copy.default")  # elementwise, without a tag that says so
FOREACH = "aten._foreach_"  # the same operation on each tensor of a list
LAYOUTS = ("dtype", "memory_format")  # options of copies
Key = tuple[Any, ...]  # of a tensor: its memory, and what it is of that


class Followed(NamedTuple):
    """What is in some memory: the exact value of a sample, and of 1 in place of all that it was computed from.

    ``sources``: what it was computed from. ``old``: the real values before the first write, None if there was none.
    """

    exact: Tensor
    sources: frozenset[Key]
    old: Tensor | None


@dataclass(eq=False)
class Averages(Watcher):
    """Follows low values from where they are read to where they are written."""

    _followed: Memory[Followed] = field(default_factory=Memory)
    _written: list[tuple[Tensor, Followed]] = field(default_factory=list)  # by the operation that runs now
    _averages: dict[Place, tuple[str, Lost]] = field(default_factory=dict)

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget all values: what an optimizer writes is not followed."""
        self._followed.clear()

    def before(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compute what will be written."""
        self._written = self._computed(call, operator, args, kwargs, args[:1])

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Keep what was computed; compare an average with what it was."""
        written, self._written = self._written, []
        if not is_mutable(operator):
            written = self._computed(call, operator, args, kwargs, result)
        elif self._followed and not written:
            for t in tensors_in(args[:1]):
                self._followed.pop(_key(t), None)
        for t, one in written:
            key = _key(t)
            self._followed.keep(t, one, *_part(t))
            weighs_one = one.old is not None and abs(float(one.exact[-1]) - 1) < ROUNDED  # in all
            if one.old is not None and t.dtype in HALVES and key in one.sources and weighs_one:
                moves = one.exact[:-1] != one.old
                stays = moves & (sample(t, MOST) == one.old)
                _, lost = self._averages.setdefault(call.place, (dtype_name(t.dtype), Lost()))
                lost.add([int(moves.sum()), int(stays.sum())], t.numel() / one.old.numel())
                del self._followed[key]

    def findings(self) -> Iterator[Finding]:
        """Yield the averages that stay as they are."""
        for place, (dtype, lost) in self._averages.items():
            if lost.share >= MANY:
                yield finding(
                    "AMP303", place,
                    f"{lost.share:.0%} of the elements of an average in {dtype} stay as they are where it should move",
                    "keep the average in float32: ema = [p.detach().float().clone() for p in model.parameters()]",
                    level="warning" if lost.share >= 0.5 else "note", dtype=dtype, share=lost.share,
                    elements=lost.changes,
                )  # fmt: skip

    # -- values ---------------------------------------------------------------------------------------

    def _computed(
        self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any
    ) -> list[tuple[Tensor, Followed]]:
        """Return what an elementwise operation makes, with the exact values; in a module, of low or followed ones."""
        is_list = call.operator.startswith(FOREACH)
        is_elementwise = is_list or call.operator in COPIES or torch.Tag.pointwise in operator.tags
        if call.phase != "forward" or not is_elementwise or "out" in kwargs or is_random(operator):
            return []
        given = tensors_in(args)
        if call.module and not any(t.dtype in HALVES or self._known(t) for t in given):
            return []
        if self.training.records and any(t.requires_grad for t in given):  # part of a graph of autograd, and no average
            return []
        if len(self._followed) > MOST_FOLLOWED:
            self._followed = Memory((key, one) for key, one in self._followed.items() if not one[0].expired())
        found = []
        for number, target in enumerate(tensors_in(targets)):
            own = [[one[number]] if is_list and isinstance(one, (list, tuple)) else one for one in args]
            operands = [t for t in tensors_in(own) if t.dim()]
            if target.dim() and all(t.shape == target.shape and t.is_floating_point() for t in operands):
                read = operands[1:] if call.operator == COPIES[0] else operands
                found.append((target, self._followed_to(target, operator, own, kwargs, read)))
        return found

    def _followed_to(
        self, target: Tensor, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Sequence[Tensor]
    ) -> Followed:
        """Compute an operation on samples."""
        wide = tree_map(self._wide, list(args))
        result = operator(*wide, **{name: value for name, value in kwargs.items() if name not in LAYOUTS})
        (exact, *_), old = tensors_in(wide if is_mutable(operator) else result), None
        if is_mutable(operator):
            known = self._known(target)
            old = sample(target, MOST).clone() if known is None or known.old is None else known.old
        sources = (known.sources if (known := self._known(t)) else {_key(t)} for t in read)
        return Followed(exact, frozenset().union(*sources), old)

    def _known(self, tensor: Tensor) -> Followed | None:
        return self._followed.known(tensor, *_part(tensor)) if self._followed else None

    def _wide(self, leaf: Any) -> Any:
        """Return a copy of a sample, with 1 behind it; of a tensor that is one number, that number."""
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim():
            return leaf.double() if leaf.is_floating_point() else leaf
        if (known := self._known(leaf)) is not None:
            return known.exact.clone()
        return torch.cat((sample(leaf, MOST).double(), torch.ones(1, dtype=torch.float64, device=leaf.device)))


def _key(tensor: Tensor) -> Key:
    return storage_key(tensor), *_part(tensor)


def _part(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells values in one memory apart."""
    return tensor.storage_offset(), tensor.shape, tensor.stride()
