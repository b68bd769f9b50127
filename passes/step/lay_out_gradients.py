"""Bring gradients into the precision and memory layout in which an update reads them, and add them up.

Before: gradients as backward makes them, in low precision where a weight was read in it, in any strides. After: fp32,
unless the update reads low precision itself, in the strides of what is updated. With micro-batches they are added to
sums, new inputs, which are the gradients behind the last one, and zero again once the update has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change, PassResult
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    JointPass,
    change_joint,
    gradient_nodes,
    joint_of,
    outputs,
    parameter_nodes,
    refuse_behind,
    set_gradients,
    set_outputs,
)
from amp_graph.passes.torch_compat.operators import foreach_add_, foreach_copy_, foreach_zero_

TOGETHER = 32  # gradients that one call casts


def upcast(grad: Tensor) -> Tensor:
    """Return ``grad`` in fp32 where it is in a lower precision."""
    return grad.float() if grad.dtype.itemsize < 4 else grad


def upcast_all(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients with fp32 in the place of low precision, cast some at a time: these exist twice meanwhile."""
    found = list(grads)
    low = [i for i, grad in enumerate(found) if grad.dtype.itemsize < 4]
    for start in range(0, len(low), TOGETHER):
        some = low[start : start + TOGETHER]
        wide = [torch.empty_like(found[i], dtype=torch.float32) for i in some]
        foreach_copy_(wide, [found[i] for i in some])
        for i, grad in zip(some, wide, strict=True):
            found[i] = grad
    return found


def laid_out(grad: Tensor, like: Tensor, keeps: Sequence[torch.dtype]) -> Tensor:
    """Return ``grad`` in fp32, unless its dtype is one that an update ``keeps``, and in the strides of ``like``."""
    return laid_out_as(like, grad if grad.dtype in keeps else upcast(grad))


@dataclass(frozen=True)
class LayOutGradients(JointPass):
    """Casts gradients of a joint graph to fp32 and lays them out as the inputs that ``JointGraph.parameters`` names.

    keeps: low precisions that the update reads. Law: each gradient keeps its elements. Exactness: bit-exact.
    """

    keeps: tuple[torch.dtype, ...] = ()

    name: ClassVar[str] = "lay-out-gradients"

    @property
    def changes_outputs(self) -> bool:
        """Gradients in low precision become fp32."""
        return True

    def run(self, gm: GraphModule) -> PassResult:
        """Append a cast, and a copy into other strides, where they are needed."""
        joint = joint_of(gm)
        grads = gradient_nodes(gm)
        likes = parameter_nodes(gm, list(joint.gradients))

        def all_laid_out(grads: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
            return [laid_out(grad, like, self.keeps) for grad, like in zip(grads, likes, strict=True)]

        made = append(gm, all_laid_out, grads, likes) if grads else []
        set_gradients(gm, made)
        changed = [(new, name) for old, new, name in zip(grads, made, joint.gradients, strict=True) if old is not new]
        return PassResult(gm, tuple(Change("gradients", "lay out a gradient", n.name, f"as {p}") for n, p in changed))


@dataclass(frozen=True)
class UpcastGradients(JointPass):
    """Casts what is still low among the gradients of a joint graph to fp32, ``TOGETHER`` by one call.

    Law: each gradient keeps its elements. Exactness: bit-exact.
    """

    name: ClassVar[str] = "upcast-gradients"

    @property
    def changes_outputs(self) -> bool:
        """Gradients in low precision become fp32."""
        return True

    def run(self, gm: GraphModule) -> PassResult:
        """Append the casts."""
        grads = gradient_nodes(gm)
        made = append(gm, upcast_all, grads) if grads else []
        set_gradients(gm, made)
        changed = [new for old, new in zip(grads, made, strict=True) if old is not new]
        return PassResult(gm, tuple(Change("gradients", "upcast a gradient", n.name, "to fp32") for n in changed))


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
class AddGradients(JointPass):
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
class ZeroSums(JointPass):
    """Zeroes ``sums``, inputs of a joint graph, behind what read them.

    Law: the sums are those of no gradients. Exactness: bit-exact.
    """

    sums: Sequence[StateInput] = ()

    name: ClassVar[str] = "zero-sums"
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Append one operator for all."""
        sums = add_inputs(gm, self.sums)
        if not sums:
            return PassResult(gm)
        append(gm, lambda totals: foreach_zero_(totals), sums)
        return PassResult(gm, (Change("micro-batches", "zero the sums", sums[0].name, "for the next step"),))
