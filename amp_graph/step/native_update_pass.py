"""Appends the one-pass update to a joint graph: check, unscale, clip, update and round in one pass over memory.

Before: backward's scaled gradients. After: ``look_at_gradients`` and one ``one_pass_update_`` per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import GraphModule

from amp_graph.optim.native_update import GroupTensors, OnePass
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.base import Change, Pass, PassResult, Writes
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    input_nodes,
    joint_of,
    node_named,
    record_done,
    refuse_behind,
    return_found_inf,
)
from amp_graph.passes.loss_scaling.unscale import inverse_of
from amp_graph.passes.step.update_parameters import GroupInputs, nodes_of


@dataclass(frozen=True)
class UpdateInOnePass(Pass):
    """Does what ``CheckFiniteAndUnscale``, ``ClipGradients`` and ``UpdateParameters`` do, and writes one copy of each.

    lows: the input that holds the first copy of a parameter, by the parameter's name. Gradients are not written.
    norm: an input, 0-d, that gets the norm of the unscaled gradients where ``clip_norm`` is given.

    Law: that of these passes. Exactness: approximate, in what ``OnePass`` says; bit-exact elsewhere.
    """

    one_pass: OnePass
    updates: Sequence[GroupUpdate]
    groups: Sequence[GroupInputs]
    lows: Mapping[str, str] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    norm: StateInput | None = None

    name: ClassVar[str] = "update-in-one-pass"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED
    adds_inputs: ClassVar[bool] = True

    @property
    def changes_outputs(self) -> bool:
        """It adds ``found_inf`` if gradients are scaled."""
        return True

    def run(self, gm: GraphModule) -> PassResult:
        """Append the update of all groups."""
        refuse_behind(gm, self.name, "clip-gradients", *UPDATES)
        nodes = [nodes_of(gm, group) for group in self.groups]
        inputs = input_nodes(gm)
        first = [[inputs.get(self.lows.get(name, "")) for name in group.parameters] for group in self.groups]
        given = [(n.parameters, n.grads, n.states, low) for n, low in zip(nodes, first, strict=True)]
        joint = joint_of(gm)
        scale = node_named(gm, joint.scale) if joint.scale else None
        norm = add_inputs(gm, [self.norm])[0] if self.norm is not None else None
        found_inf = append(gm, self._finish, given, [n.rate for n in nodes], scale, norm)
        if found_inf is not None:
            return_found_inf(gm, found_inf)
        record_done(gm, self.name)
        count = sum(len(group.parameters) for group in self.groups)
        return PassResult(gm, (Change("update", "update in one pass", nodes[0].rate.name, f"{count} parameters"),))

    def _finish(
        self, given: Sequence[Any], rates: Sequence[Tensor], scale: Tensor | None, norm: Tensor | None
    ) -> Tensor | None:
        groups = []
        for update, (params, grads, states, lows) in zip(self.updates, given, strict=True):
            groups.append(GroupTensors(params, grads, states, lows, "step" in update.state_names()))
        inverse = None if scale is None else inverse_of(scale)
        return self.one_pass.finish(self.updates, groups, rates, inverse, self.clip_norm, self.clip_value, norm)
