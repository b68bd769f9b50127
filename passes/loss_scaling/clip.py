"""Clip gradients by their norm and by value, as ``torch.nn.utils`` does it, operation by operation.

Before: unscaled gradients. After: the same tensors, with a norm of at most ``norm``, each element within ``value``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassError, PassResult, Writes
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import UPDATES, joint_of, record_done, refuse_behind
from amp_graph.passes.loss_scaling.unscale import own_gradients
from amp_graph.passes.torch_compat.operators import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_, foreach_norm


def clip_(grads: Sequence[Tensor], norm: float | None, value: float | None, into: Tensor | None = None) -> None:
    """Clip ``grads`` in place, by their norm first; None leaves one of both out. into: 0-d, gets the norm as it was."""
    grads = list(grads)
    if norm is not None:
        norms = foreach_norm(grads, 2.0)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        foreach_mul_(grads, torch.clamp(norm / (total + 1e-6), max=1.0))
        if into is not None:
            into.copy_(total)
    if value is not None:
        foreach_clamp_min_(grads, -value)
        foreach_clamp_max_(grads, value)


@dataclass(frozen=True)
class ClipGradients(Pass):
    """Clips the gradients of a joint graph in place. norm: of all together; value: of each element; None: not at all.

    into: an input, 0-d, that gets their norm before it is clipped.

    Law: as ``clip_grad_norm_``, then ``clip_grad_value_``. Exactness: bit-exact.
    """

    norm: float | None = None
    value: float | None = None
    into: StateInput | None = None

    name: ClassVar[str] = "clip-gradients"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Append the clipping."""
        joint = joint_of(gm)
        refuse_behind(gm, self.name, *UPDATES)
        if joint.scale:
            raise PassError(
                f"pass clip-gradients: gradients are multiplied by {joint.scale}, and limits are for those of the loss"
                "\n  fix:   run CheckFiniteAndUnscale() over the graph first"
            )
        limits = [
            f"{name} {limit:g}" for name, limit in (("norm", self.norm), ("value", self.value)) if limit is not None
        ]
        if not limits or not joint.gradients:
            return PassResult(gm)
        grads = own_gradients(gm)
        into = add_inputs(gm, [self.into])[0] if self.into is not None else None
        append(gm, clip_, grads, self.norm, self.value, into)
        record_done(gm, self.name)
        return PassResult(gm, (Change("clip", "clip gradients", grads[0].name, f"to a {' and a '.join(limits)}"),))
