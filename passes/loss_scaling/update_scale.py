"""Move the loss scale by the verdict on the gradients, in place and on the device.

Before: ``found_inf``, and the scale that this step used. After: ``update_loss_scale_`` has the next step's scale in
the input that was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassError, PassResult, Writes
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import found_inf_node
from amp_graph.passes.loss_scaling.operators import OPS
from amp_graph.passes.loss_scaling.scale_loss import SCALE

# The other inputs of ``update_loss_scale_``, 0-d int32, as graphs name them and as people read them.
COUNTS = {
    "growth_tracker": "good steps",
    "hysteresis_left": "hysteresis left",
    "skipped": "skipped steps",
    "stuck": "bad steps at the floor",
}


@dataclass(frozen=True)
class UpdateLossScale(Pass):
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

    name: ClassVar[str] = "update-loss-scale"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
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
        return PassResult(gm, (Change("loss scale", "update the loss scale", scale.name, f"by {found_inf.name}"),))
