"""Name what an update writes where that is no input of the graph: fp32 masters of parameters in low precision.

Before: a gradient and the low parameter that it is of. After: the master, a new input, is what the update writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs
from amp_graph.passes.loss_scaling.joint_graph import change_joint, joint_of


@dataclass(frozen=True)
class AddUpdateTargets(Pass):
    """Lets an update write these ``targets``, by name of parameter; adds an input for each.

    Masters, and parameters that other micro-batches alone have sent gradients. Law: the graph computes what it did.
    ``WriteLowCopies`` rounds masters into their parameters. Exactness: bit-exact.
    """

    targets: Mapping[str, StateInput] = field(default_factory=dict)

    name: ClassVar[str] = "add-update-targets"
    required: ClassVar[bool] = True
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Add the inputs."""
        nodes = add_inputs(gm, list(self.targets.values()))
        made = {parameter: node.name for parameter, node in zip(self.targets, nodes, strict=True)}
        change_joint(gm, parameters={**joint_of(gm).parameters, **made})
        changes = (Change("targets", "update an input", name, f"for {parameter}") for parameter, name in made.items())
        return PassResult(gm, tuple(changes))
