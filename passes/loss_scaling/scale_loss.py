"""Scale the loss, check and unscale the gradients, and move the scale by the verdict, which stays on the device.

Before: ``ones_like(loss)``, or an input, is the gradient of the loss, and the gradients are those of the loss. After:
it is divided by the number of micro-batches and multiplied by ``loss_scale``, a new input;
``check_finite_and_unscale_(grads, 1 / loss_scale, found_inf)`` is one operator over all gradients, and
``update_loss_scale_`` has the next step's scale in the input that was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, PassError, Writes
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    JointPass,
    change_joint,
    found_inf_node,
    gradient_nodes,
    joint_of,
    node_named,
    outputs,
    refuse_behind,
    set_gradients,
    set_outputs,
    shared_gradients,
)
from amp_graph.passes.loss_scaling.operators import OPS

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
class ScaleLoss(JointPass):
    """Multiplies the gradients of a joint graph by a loss scale, at their source.

    micro_batches: also divide them by that many, whose gradients are added up. scaled: False only divides.

    Law: gradients are those of ``loss * loss_scale / micro_batches``; the loss that is returned stays what it was.
    Exactness: bit-exact, against a trace of that product. Adds the input ``loss_scale``, 0-d fp32.
    """

    micro_batches: int = 1
    scaled: bool = True

    writes: ClassVar[Writes] = Writes.KEPT
    adds_inputs: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Put the scaled seed in the place of the seed."""
        joint = joint_of(gm)
        if joint.scale:
            raise PassError(f"pass scale-loss: gradients are multiplied by {joint.scale} already\n  fix:   run it once")
        refuse_behind(gm, self.name, "check-finite-and-unscale", "clip-gradients", *UPDATES)
        if not joint.gradients or (not self.scaled and self.micro_batches == 1):
            return
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
        yield Change("scale loss", "multiply the gradient of the loss", made.name, f"by {what}")


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
class CheckFiniteAndUnscale(JointPass):
    """Unscales the gradients of a joint graph in place, and returns ``found_inf`` behind the other outputs.

    Law: each gradient is multiplied by 1 / loss_scale, in fp32, rounded to its own dtype; ``found_inf`` is 1.0 where
    any element of any gradient is infinite or NaN, else 0.0. Exactness: bit-exact where the scale is a power of two.
    """

    changes_outputs = True  # it adds one

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append the check."""
        joint = joint_of(gm)
        refuse_behind(gm, self.name, *UPDATES)
        if not joint.scale:
            raise PassError(
                "pass check-finite-and-unscale: gradients are not scaled\n  fix:   run ScaleLoss() over the graph first"
            )
        if not joint.gradients:
            return
        grads = own_gradients(gm)
        found_inf = append(gm, unscale, grads, node_named(gm, joint.scale))
        outs = outputs(gm)
        set_outputs(gm, [*outs, found_inf])
        change_joint(gm, scale="", found_inf=len(outs), done=(*joint.done, self.name))
        how = f"{len(grads)} gradients by one operator"
        yield Change("unscale", "check and unscale gradients", found_inf.name, how)


# The other inputs of ``update_loss_scale_``, 0-d int32, as graphs name them and as people read them.
COUNTS = {
    "growth_tracker": "good steps",
    "hysteresis_left": "hysteresis left",
    "skipped": "skipped steps",
    "stuck": "bad steps at the floor",
}


@dataclass(frozen=True)
class UpdateLossScale(JointPass):
    """Appends ``amp_graph::update_loss_scale_`` to a joint graph; the options are those of the operator.

    Law: after ``growth_interval`` good steps in a row the scale is multiplied by ``growth_factor``; after
    ``hysteresis`` bad ones by ``backoff_factor``; it stays within ``floor`` and ``ceiling``. Exactness: bit-exact.
    Adds the inputs of ``COUNTS``, and writes them and ``loss_scale``.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    floor: float = 2.0**-14
    ceiling: float = 2.0**32

    adds_inputs: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append the operator."""
        found_inf = found_inf_node(gm)
        if found_inf is None:
            raise PassError(
                "pass update-loss-scale: no pass has looked for infinite gradients\n"
                "  fix:   run ScaleLoss() and CheckFiniteAndUnscale() over the graph first"
            )
        verdict = value(found_inf)
        like = verdict.new_empty((), dtype=torch.int32)
        counts = [StateInput(name, like, shown) for name, shown in COUNTS.items()]
        scale, *counters = add_inputs(gm, [StateInput(SCALE, verdict, "loss scale"), *counts])
        options = (self.growth_factor, self.backoff_factor, self.growth_interval, self.hysteresis)
        append(gm, OPS.update_loss_scale_, scale, *counters, found_inf, *options, self.floor, self.ceiling)
        yield Change("loss scale", "update the loss scale", scale.name, f"by {found_inf.name}")
