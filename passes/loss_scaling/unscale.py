"""Check gradients for infinities and NaN, and unscale them: one operator over all, whose verdict stays on the device.

Before: gradients of the scaled loss. After: ``check_finite_and_unscale_(grads, 1 / loss_scale, found_inf)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassError, PassResult, Writes
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    gradient_nodes,
    joint_of,
    node_named,
    record_done,
    refuse_behind,
    return_found_inf,
    set_gradients,
    shared_gradients,
)
from amp_graph.passes.loss_scaling.operators import OPS


def inverse_of(scale: Tensor) -> Tensor:
    """Return 1 / scale, by way of fp64, so that it is exact to the last bit."""
    return scale.double().reciprocal().float()


def unscale(grads: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Unscale ``grads`` in place; return ``found_inf``, 0-d fp32, 1.0 where any element is not finite."""
    found_inf = torch.zeros_like(scale)
    OPS.check_finite_and_unscale_(list(grads), inverse_of(scale), found_inf)
    return found_inf


def own_gradients(gm: GraphModule) -> list[Node]:
    """Return gradients that can be written in place, copied where they share memory, and make them the graph's.

    Autograd gives both summands of ``b1 + b2`` one tensor.
    """
    found = gradient_nodes(gm)
    shared = [i for i, is_shared in enumerate(shared_gradients(gm)) if is_shared]
    if shared:
        copies = append(gm, lambda grads: [grad.clone() for grad in grads], [found[i] for i in shared])
        for i, copy in zip(shared, copies, strict=True):
            found[i] = copy
        set_gradients(gm, found)
    return found


@dataclass(frozen=True)
class CheckFiniteAndUnscale(Pass):
    """Unscales the gradients of a joint graph in place, and returns ``found_inf`` behind the other outputs.

    Law: each gradient is multiplied by 1 / loss_scale, in fp32, rounded to its own dtype; ``found_inf`` is 1.0 where
    any element of any gradient is infinite or NaN, else 0.0. Exactness: bit-exact where the scale is a power of two.
    """

    name: ClassVar[str] = "check-finite-and-unscale"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED

    @property
    def changes_outputs(self) -> bool:
        """It adds one."""
        return True

    def run(self, gm: GraphModule) -> PassResult:
        """Append the check."""
        joint = joint_of(gm)
        refuse_behind(gm, self.name, *UPDATES)
        if not joint.scale:
            raise PassError(
                "pass check-finite-and-unscale: gradients are not scaled\n  fix:   run ScaleLoss() over the graph first"
            )
        if not joint.gradients:
            return PassResult(gm)
        grads = own_gradients(gm)
        found_inf = append(gm, unscale, grads, node_named(gm, joint.scale))
        return_found_inf(gm, found_inf)
        record_done(gm, self.name)
        how = f"{len(grads)} gradients by one operator"
        return PassResult(gm, (Change("unscale", "check and unscale gradients", found_inf.name, how),))
