"""Return from a step what its caller reads: the forward's outputs, and gradients where an optimizer outside steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.loss_scaling.joint_graph import change_joint, found_inf_node, joint_of, outputs, set_outputs


@dataclass(frozen=True)
class ReturnOutputs(Pass):
    """Returns the first ``count`` outputs of a joint graph, and behind them its ``gradients`` and ``found_inf``.

    Law: what is returned is what it was; what is no longer returned stays computed where something reads it.
    Exactness: bit-exact.
    """

    count: int = 1
    gradients: bool = False

    name: ClassVar[str] = "return-outputs"
    required: ClassVar[bool] = True

    @property
    def changes_outputs(self) -> bool:
        """There are fewer, or in another order."""
        return True

    def run(self, gm: GraphModule) -> PassResult:
        """Choose among the outputs."""
        joint, outs, verdict = joint_of(gm), outputs(gm), found_inf_node(gm)
        found = outs[: self.count]
        gradients = [outs[number] for number in joint.gradients.values()] if self.gradients else []
        behind = [verdict] if self.gradients and verdict is not None else []
        set_outputs(gm, [*found, *gradients, *behind])
        places = {name: self.count + i for i, name in enumerate(joint.gradients)} if self.gradients else {}
        change_joint(gm, gradients=places, found_inf=self.count + len(places) if behind else None)
        output = gm.graph.output_node()
        return PassResult(gm, (Change("outputs", "return outputs", output.name, f"{len(found)}, and what is read"),))
