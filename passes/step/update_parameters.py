"""The optimizer's update as operations of the graph, which change nothing where a gradient was infinite.

Before: gradients, unscaled and clipped. After: parameters, or their masters, and the optimizer's state are written.
A gradient that is ``add_rows``, which nothing else reads, is not made: the rows are updated apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassError, PassResult, Writes
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import (
    change_joint,
    found_inf_node,
    joint_of,
    outputs,
    parameter_nodes,
    record_done,
    set_outputs,
)
from amp_graph.passes.step.add_rows import ADD_ROWS, Apply, by_rows


@dataclass(frozen=True)
class GroupInputs:
    """One parameter group: how it updates, its parameters by name, its learning rate, its state by kind.

    elementwise: whether each element's update depends on that element's gradient and state alone.
    """

    apply: Apply
    parameters: Sequence[str]
    rate: StateInput
    states: Sequence[Sequence[StateInput]] = ()
    elementwise: bool = False


@dataclass(frozen=True)
class GroupNodes:
    """The nodes of one group in a joint graph."""

    parameters: list[Node]
    grads: list[Node]
    rate: Node
    states: list[list[Node]]


def nodes_of(gm: GraphModule, group: GroupInputs) -> GroupNodes:
    """Return the nodes of a group; adds the inputs that it lacks."""
    joint, outs = joint_of(gm), outputs(gm)
    if missing := next((name for name in group.parameters if name not in joint.gradients), None):
        raise PassError(
            f"pass update-parameters: the graph has no gradient of {missing}\n"
            f"  legal: {', '.join(joint.gradients)}\n  fix:   leave it out of the group"
        )
    grads = [outs[joint.gradients[name]] for name in group.parameters]
    rate, *states = add_inputs(gm, [group.rate, *(given for kind in group.states for given in kind)])
    count = len(group.parameters)
    kinds = [states[start : start + count] for start in range(0, len(states), count)]
    return GroupNodes(parameter_nodes(gm, group.parameters), grads, rate, kinds)


def _is_unread_sum(grad: Node) -> bool:
    """Say whether ``grad`` is a sum with rows that no pass has read, or changed in place."""
    return grad.target is ADD_ROWS and len(grad.users) == 1


def _remove(gm: GraphModule, grads: Sequence[Node]) -> None:
    """Take gradients out of a joint graph."""
    set_outputs(gm, [None if out in grads else out for out in outputs(gm)])
    named = joint_of(gm).gradients.items()
    change_joint(gm, gradients={name: n for name, n in named if outputs(gm)[n] is not None})
    for grad in grads:
        gm.graph.erase_node(grad)


@dataclass(frozen=True)
class UpdateParameters(Pass):
    """Updates parameters in place by functions of the optimizer, one a group.

    Law: what ``apply`` does to tensors; with ``found_inf`` above 0, nothing changes. Exactness: bit-exact, against
    ``apply``.
    """

    groups: Sequence[GroupInputs] = ()

    name: ClassVar[str] = "update-parameters"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED
    adds_inputs: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Append the update of each group."""
        if joint_of(gm).scale:
            raise PassError(
                "pass update-parameters: gradients are still scaled\n"
                "  fix:   run CheckFiniteAndUnscale() over the graph first"
            )
        changes = []
        for group in self.groups:
            own = nodes_of(gm, group)
            sums = {n: g for n, g in enumerate(own.grads) if group.elementwise and _is_unread_sum(g)}
            grads = [g.args[0] if n in sums else g for n, g in enumerate(own.grads)]
            apply, rows = by_rows(group.apply, list(sums)), [g.args[1:] for g in sums.values()]
            append(gm, apply, own.parameters, grads, own.states, own.rate, found_inf_node(gm), rows)
            _remove(gm, [*sums.values()])
            what = f"{len(own.parameters)} parameters"
            changes.append(Change("update", "update a parameter group", own.parameters[0].name, what))
        record_done(gm, self.name)
        return PassResult(gm, tuple(changes))
