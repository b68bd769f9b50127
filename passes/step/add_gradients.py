"""Add gradients to those of earlier micro-batches, and read the sums as gradients where the last one is done.

Before: gradients of one micro-batch. After: sums, new inputs, that have grown by them; behind the last micro-batch they
are the gradients, and zero again once the update has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassResult, Writes
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    change_joint,
    gradient_nodes,
    joint_of,
    outputs,
    refuse_behind,
    set_outputs,
)
from amp_graph.passes.torch_compat.operators import foreach_add_, foreach_zero_

Add = Callable[[list[Tensor], list[Tensor]], None]


def add_in_place(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add ``grads`` to ``sums``, which are as many."""
    if sums:
        foreach_add_(list(sums), list(grads))


def totals_of(sums: Sequence[Tensor], grads: Sequence[Tensor], own: Sequence[int]) -> list[Tensor]:
    """Return the sums with ``grads`` added to those numbered ``own``, one by one, as new tensors."""
    totals = list(sums)
    for n, grad in zip(own, grads, strict=True):
        totals[n] = sums[n] + grad
    return totals


@dataclass(frozen=True)
class AddGradients(Pass):
    """Adds the gradients of a joint graph to ``sums``, by name of parameter; adds an input for each.

    ``add``: how. ``into``: "sums" writes them; "new" leaves them as they were and makes new totals, for each all-reduce
    to start at its last gradient. ``last``: the totals are the gradients from now on, also those of parameters that
    have none in this graph; ``copied``: as copies, for a caller who keeps them.

    Law: each total is the sum of the gradients of all micro-batches, in their order. Exactness: bit-exact.
    """

    sums: Mapping[str, StateInput] = field(default_factory=dict)
    add: Add = add_in_place
    into: str = "sums"
    last: bool = True
    copied: bool = False

    name: ClassVar[str] = "add-gradients"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED
    adds_inputs: ClassVar[bool] = True

    @property
    def changes_outputs(self) -> bool:
        """There may be further gradients."""
        return True

    def run(self, gm: GraphModule) -> PassResult:
        """Append the sums."""
        joint = joint_of(gm)
        refuse_behind(gm, self.name, "average-over-ranks", "check-finite-and-unscale", "clip-gradients", *UPDATES)
        grads = gradient_nodes(gm)
        sums = add_inputs(gm, list(self.sums.values()))
        names = list(self.sums)
        own = [names.index(name) for name in joint.gradients]
        found = sums
        if grads and self.into == "new":
            found = append(gm, totals_of, sums, grads, own)
        elif grads:
            append(gm, self.add, [sums[n] for n in own], grads)
        if self.last and self.copied and sums:
            found = append(gm, lambda totals: [total.clone() for total in totals], sums)
        if self.last:
            outs = outputs(gm)
            for number in joint.gradients.values():
                outs[number] = None
            set_outputs(gm, [*outs, *found])
            change_joint(gm, gradients={name: len(outs) + i for i, name in enumerate(names)})
        what = f"{len(own)} gradients to {len(sums)} sums"
        return PassResult(gm, (Change("micro-batches", "add up gradients", sums[0].name, what),) if sums else ())


@dataclass(frozen=True)
class ZeroSums(Pass):
    """Zeroes ``sums``, inputs of a joint graph, behind what read them.

    Law: the sums are those of no gradients. Exactness: bit-exact.
    """

    sums: Sequence[StateInput] = ()

    name: ClassVar[str] = "zero-sums"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Append one operator for all."""
        sums = add_inputs(gm, self.sums)
        if not sums:
            return PassResult(gm)
        append(gm, lambda totals: foreach_zero_(totals), sums)
        return PassResult(gm, (Change("micro-batches", "zero the sums", sums[0].name, "for the next step"),))
