"""Scale the loss, where backward starts: every gradient is then a multiple of what it was.

Before: ``ones_like(loss)``, or an input, is the gradient of the loss. After: that, divided by the number of
micro-batches and multiplied by ``loss_scale``, a new input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassError, PassResult
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import UPDATES, change_joint, joint_of, node_named, refuse_behind

SCALE = "loss_scale"


def scaled_seed(seed: Tensor, scale: Tensor | None, micro_batches: int) -> Tensor:
    """Return the gradient of ``loss`` where ``loss * scale / micro_batches`` is what gradients are taken of."""
    found = seed if scale is None else seed.to(torch.result_type(seed, scale))
    if micro_batches > 1:
        found = found / micro_batches
    if scale is not None:
        found = found * scale
    return found.to(seed.dtype)


@dataclass(frozen=True)
class ScaleLoss(Pass):
    """Multiplies the gradients of a joint graph by a loss scale, at their source.

    micro_batches: also divide them by that many, whose gradients are added up. scaled: False only divides.

    Law: gradients are those of ``loss * loss_scale / micro_batches``; the loss that is returned stays what it was.
    Exactness: bit-exact, against a trace of that product. Adds the input ``loss_scale``, 0-d fp32.
    """

    micro_batches: int = 1
    scaled: bool = True

    name: ClassVar[str] = "scale-loss"
    required: ClassVar[bool] = True
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Put the scaled seed in the place of the seed."""
        joint = joint_of(gm)
        if joint.scale:
            raise PassError(f"pass scale-loss: gradients are multiplied by {joint.scale} already\n  fix:   run it once")
        refuse_behind(gm, self.name, "check-finite-and-unscale", "clip-gradients", *UPDATES)
        if not joint.gradients or (not self.scaled and self.micro_batches == 1):
            return PassResult(gm)
        seed = node_named(gm, joint.seed)
        like = tensors(value(seed))[0].new_empty((), dtype=torch.float32)
        (scale,) = add_inputs(gm, [StateInput(SCALE, like, "loss scale")]) if self.scaled else (None,)
        users = list(seed.users)
        before = seed.next if seed.op != "placeholder" else next(n for n in gm.graph.nodes if n.op != "placeholder")
        made = append(gm, scaled_seed, seed, scale, self.micro_batches, before=before)
        for user in users:
            user.replace_input_with(seed, made)
        change_joint(gm, seed=made.name, scale=SCALE if self.scaled else "")
        what = " / ".join(
            ["the loss scale"] * self.scaled + [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        )
        return PassResult(gm, (Change("scale loss", "multiply the gradient of the loss", made.name, f"by {what}"),))
