"""The end of a step: name what is updated, update it, write low copies, and return what the caller reads.

Before: gradients, unscaled and clipped. After: parameters, or their fp32 masters, and the optimizer's state are
written, unless a gradient was infinite; the low-precision copies that the next forward reads are written as well. A
gradient that is ``add_rows``, which nothing else reads, is not made: the rows are updated apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, PassError, Writes
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.joint_graph import (
    JointPass,
    change_joint,
    found_inf_node,
    input_nodes,
    joint_of,
    node_named,
    outputs,
    parameter_nodes,
    record_done,
    set_outputs,
)
from amp_graph.passes.step.row_gradients import ADD_ROWS, Apply, by_rows
from amp_graph.passes.torch_compat.operators import foreach_copy_


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


def nodes_of(gm: GraphModule, group: GroupInputs) -> tuple[list[Node], list[Node], list[list[Node]], Node]:
    """Return parameters, gradients, states by kind and learning rate of a group; adds the inputs that it lacks."""
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
    return parameter_nodes(gm, group.parameters), grads, kinds, rate


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


def _apart(group: GroupInputs, skips: Mapping[str, str]) -> Iterator[GroupInputs]:
    """Yield what is updated with ``group``, and by itself each of its parameters that may be skipped."""
    together = [n for n, name in enumerate(group.parameters) if name not in skips]
    for own in (together, *([n] for n, name in enumerate(group.parameters) if name in skips)):
        if own:
            states = [[kind[n] for n in own] for kind in group.states]
            yield replace(group, parameters=[group.parameters[n] for n in own], states=states)


def _verdict(gm: GraphModule, group: GroupInputs) -> Any:
    """Return what is above 0 where ``group`` is not updated; None if it always is."""
    found, skip = found_inf_node(gm), joint_of(gm).skips.get(group.parameters[0])
    if skip is None:
        return found
    known = node_named(gm, skip)
    return known if found is None else append(gm, torch.maximum, found, known)


@dataclass(frozen=True)
class UpdateParameters(JointPass):
    """Updates parameters in place by functions of the optimizer, one a group.

    Law: what ``apply`` does to tensors; with ``found_inf``, or the parameter's own of ``JointGraph.skips``, above 0,
    nothing changes. Exactness: bit-exact, against ``apply``.
    """

    groups: Sequence[GroupInputs] = ()

    adds_inputs: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append the update of each group."""
        if joint_of(gm).scale:
            raise PassError(
                "pass update-parameters: gradients are still scaled\n"
                "  fix:   run CheckFiniteAndUnscale() over the graph first"
            )
        skips = joint_of(gm).skips
        for group in (part for whole in self.groups for part in _apart(whole, skips)):
            parameters, gradients, states, rate = nodes_of(gm, group)
            sums = {n: g for n, g in enumerate(gradients) if group.elementwise and _is_unread_sum(g)}
            grads = [g.args[0] if n in sums else g for n, g in enumerate(gradients)]
            apply, rows = by_rows(group.apply, list(sums)), [g.args[1:3] for g in sums.values()]
            append(gm, apply, parameters, grads, states, rate, _verdict(gm, group), rows)
            _remove(gm, [*sums.values()])
            what = f"{len(parameters)} parameters"
            yield Change("update", "update a parameter group", parameters[0].name, what)
        record_done(gm, self.name)


@dataclass(frozen=True)
class AddUpdateTargets(JointPass):
    """Lets an update write these ``targets``, by name of parameter; adds an input for each.

    These are masters, which ``WriteLowCopies`` rounds into their parameters. Law: the graph computes what it did.
    Exactness: bit-exact.
    """

    targets: Mapping[str, StateInput] = field(default_factory=dict)

    writes: ClassVar[Writes] = Writes.KEPT
    adds_inputs: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Add the inputs."""
        nodes = add_inputs(gm, list(self.targets.values()))
        made = {parameter: node.name for parameter, node in zip(self.targets, nodes, strict=True)}
        change_joint(gm, parameters={**joint_of(gm).parameters, **made})
        yield from (Change("targets", "update an input", name, f"for {parameter}") for parameter, name in made.items())


def write_copies(lows: Sequence[Tensor], fulls: Sequence[Tensor], pointwise: bool) -> None:
    """Round ``fulls`` into ``lows``; ``pointwise``: one by one, for a compiler to fuse."""
    if pointwise:
        for low, full in zip(lows, fulls, strict=True):
            low.copy_(full)
    elif lows:
        foreach_copy_(list(lows), list(fulls))


@dataclass(frozen=True)
class WriteLowCopies(JointPass):
    """Rounds what is updated into ``copies``: by name of parameter, the inputs of the graph that hold its copies.

    Law: each copy is the updated parameter, or master, cast to the copy's dtype. Exactness: bit-exact.
    """

    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pointwise: bool = False

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append the casts."""
        known = input_nodes(gm)
        fulls = dict(zip(self.copies, parameter_nodes(gm, list(self.copies)), strict=True))
        pairs = [(known[low], fulls[name]) for name, lows in self.copies.items() for low in lows]
        if not pairs:
            return
        append(gm, write_copies, [low for low, _ in pairs], [full for _, full in pairs], self.pointwise)
        yield Change("low copies", "write copies", pairs[0][0].name, f"{len(pairs)} casts")


@dataclass(frozen=True)
class ReturnOutputs(JointPass):
    """Returns the first ``count`` outputs of a joint graph, behind them its ``gradients``, ``found_inf`` and ``skips``.

    Law: what is returned is what it was; what is no longer returned stays computed where something reads it.
    Exactness: bit-exact.
    """

    count: int = 1
    gradients: bool = False

    writes: ClassVar[Writes] = Writes.KEPT
    changes_outputs = True  # there are fewer, or in another order

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Choose among the outputs."""
        joint, outs, verdict = joint_of(gm), outputs(gm), found_inf_node(gm)
        found = outs[: self.count]
        gradients = [outs[number] for number in joint.gradients.values()] if self.gradients else []
        behind = [verdict] if self.gradients and verdict is not None else []
        skips = [node_named(gm, name) for name in joint.skips.values()] if self.gradients else []
        set_outputs(gm, [*found, *gradients, *behind, *skips])
        places = {name: self.count + i for i, name in enumerate(joint.gradients)} if self.gradients else {}
        change_joint(gm, gradients=places, found_inf=self.count + len(places) if behind else None)
        output = gm.graph.output_node()
        yield Change("outputs", "return outputs", output.name, f"{len(found)}, and what is read")
