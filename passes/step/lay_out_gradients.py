"""Bring gradients into the precision and memory layout in which an update reads them.

Before: gradients as backward makes them, in low precision where a weight was read in it, in any strides. After: fp32,
unless the update reads low precision itself, in the strides of what is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.loss_scaling.joint_graph import (
    JointPass,
    gradient_nodes,
    joint_of,
    parameter_nodes,
    set_gradients,
)
from amp_graph.passes.torch_compat.operators import foreach_copy_

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

    keeps: low precisions that the update reads. together: cast ``TOGETHER`` gradients by one call, behind all of them;
    else each by itself, so that what reads it can start, or a compiler fuse it.

    Law: each gradient keeps its elements. Exactness: bit-exact.
    """

    keeps: tuple[torch.dtype, ...] = ()
    together: bool = False

    changes_outputs = True  # gradients in low precision become fp32

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append a cast, and a copy into other strides, where they are needed."""
        joint = joint_of(gm)
        grads = gradient_nodes(gm)
        likes = parameter_nodes(gm, list(joint.gradients))

        def all_laid_out(grads: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
            if self.together:
                grads = upcast_all([laid_out_as(like, grad) for grad, like in zip(grads, likes, strict=True)])
            return [laid_out(grad, like, self.keeps) for grad, like in zip(grads, likes, strict=True)]

        made = append(gm, all_laid_out, grads, likes) if grads else []
        set_gradients(gm, made)
        changed = [(new, name) for old, new, name in zip(grads, made, joint.gradients, strict=True) if old is not new]
        yield from (Change("gradients", "lay out a gradient", n.name, f"as {p}") for n, p in changed)
