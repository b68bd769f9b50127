"""Reduce gradients to the shards of their parameters, a unit at a time, and have the ranks agree on norm and verdict.

Before: gradients of full size, of this rank's batch. After: one ``reduce_scatter_tensor`` a unit, started behind the
last gradient in it, and gradients that are this rank's rows of the ranks' mean. What one rank finds in its rows, the
others are told by one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import SENT
from amp_graph.passes.graph.node_info import is_collective
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    JointPass,
    change_joint,
    found_inf_node,
    gradient_nodes,
    joint_of,
    outputs,
    record_done,
    refuse_behind,
    set_gradients,
    set_outputs,
)
from amp_graph.passes.sharding.shard_parameters import Sent, Shard, Unit, padded, rows_of
from amp_graph.passes.step.lay_out_gradients import upcast
from amp_graph.passes.torch_compat.operators import collectives, foreach_norm


def scatter(grads: Sequence[Tensor], unit: Unit) -> Tensor:
    """Start one reduction of ``grads``, divided by the number of ranks before they are added as averages are."""
    parts = [padded(upcast(g), rows_of(g.shape, unit.size) * unit.size).reshape(unit.size, -1) for g in grads]
    flat = torch.cat(parts, 1) / unit.ranks
    flat = flat if unit.reduce_dtype is None else flat.to(unit.reduce_dtype)
    return collectives.reduce_scatter_tensor(flat, "sum", unit.size, unit.group)


def scattered(flat: Tensor, shapes: Sequence[torch.Size], shards: Sequence[Tensor], unit: Unit) -> list[Tensor]:
    """Wait for a reduction, and return its parts: of gradients of these ``shapes``, the rows that ``shards`` have."""
    done = collectives.wait_tensor(flat)
    if unit.replicas:
        done = collectives.wait_tensor(collectives.all_reduce(done, "sum", unit.replicas))
    rows = [rows_of(shape, unit.size) for shape in shapes]
    counts = [count * prod(shape[1:]) for count, shape in zip(rows, shapes, strict=True)]
    parts = done.reshape(-1).split(counts)
    whole = [part.view(count, *one.shape[1:]) for part, count, one in zip(parts, rows, shards, strict=True)]
    return [part.narrow(0, 0, len(one)).to(one.dtype) for part, one in zip(whole, shards, strict=True)]


@dataclass(frozen=True)
class ScatterGradients(JointPass):
    """Reduces gradients of a joint graph to ``shards``, by name of parameter, in one reduction a unit.

    Law: each is this rank's rows of the mean of the ranks' gradients, in its parameter's dtype. Exactness: approximate,
    the sum's order is the network's. At two ranks bit-exact, against ``AverageOverRanks``.
    """

    units: Sequence[Unit] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)

    changes_outputs = True  # gradients in low precision become fp32

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Start each reduction behind the unit's last gradient, and wait for all at the end."""
        refuse_behind(gm, self.name, "average-over-ranks", "check-finite-and-unscale", "clip-gradients", *UPDATES)
        grads, names = gradient_nodes(gm), list(joint_of(gm).gradients)
        place = {node: n for n, node in enumerate(gm.graph.nodes)}
        started = []
        for number, unit in enumerate(self.units):
            own = [i for i, name in enumerate(names) if name in self.shards and self.shards[name][0] == number]
            if own:
                last = max((grads[i] for i in own), key=place.__getitem__)
                flat = append(gm, scatter, [grads[i] for i in own], unit, before=_behind(last))
                asked = " as reduce_dtype says" if unit.reduce_dtype else ""
                flat.meta[SENT] = Sent(unit.name, "reduce", f"gradients{asked}")
                started.append((unit, own, flat))
        for unit, own, flat in started:
            shapes, shards = [value(grads[i]).shape for i in own], [self.shards[names[i]][1] for i in own]
            fakes = [value(grads[i]).new_empty(one.shape, dtype=one.dtype) for i, one in zip(own, shards, strict=True)]
            for i, node in zip(own, append(gm, scattered, flat, shapes, fakes, unit), strict=True):
                grads[i] = node
            if unit.replicas:
                _label(gm, Sent(unit.name, "sum", "gradients of replicas"))
            what = f"{len(own)} gradients of {unit.name or 'the whole model'}"
            yield Change("reduce", "reduce gradients to shards", flat.name, what)
        set_gradients(gm, grads)
        record_done(gm, self.name)


def _label(gm: GraphModule, sent: Sent) -> None:
    """Note what the collectives send that are new in a graph."""
    for node in gm.graph.nodes:
        if is_collective(node):
            node.meta.setdefault(SENT, sent)


def _behind(node: Node) -> Node:
    """Return the node behind ``node``, and behind all inputs."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def agree(
    sharded: Sequence[Tensor], equal: Sequence[Tensor], verdict: Tensor | None, unit: Unit
) -> tuple[Tensor, Tensor]:
    """Return the norm of all gradients, and 1.0 if the verdict of any rank is above 0: by one all-reduce.

    sharded: this rank's rows. equal: gradients that are the same on all ranks, of which each has its part.
    """
    both = [(grads, parts) for grads, parts in ((sharded, 1), (equal, unit.size)) if grads]
    squares = [_square(grads) / parts for grads, parts in both]
    bad = torch.zeros_like(squares[0]) if verdict is None else verdict.double()
    total = collectives.all_reduce(torch.stack([sum(squares, torch.zeros_like(bad)), bad]), "sum", unit.group)
    square, count = collectives.wait_tensor(total).unbind()
    return square.sqrt().float(), (count > 0).float()


def _square(grads: Sequence[Tensor]) -> Tensor:
    """Return the square of the norm of ``grads``, in fp64, which has room for it."""
    return torch.linalg.vector_norm(torch.stack(list(foreach_norm(list(grads), 2.0))), 2.0).double().square()


@dataclass(frozen=True)
class AgreeOnShards(JointPass):
    """Has the ranks of ``unit`` agree on what they found in their shards: the verdict, and the norm for clipping.

    sharded: the names of parameters whose gradients are shards; all others' are equal on the ranks.

    Law: the verdict is 1.0 on all ranks if it was on one. The norm is that of all gradients. Exactness: approximate,
    the order of the sum is another.
    """

    unit: Unit
    sharded: frozenset[str] = frozenset()

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append one all-reduce; later passes read its results."""
        refuse_behind(gm, self.name, "clip-gradients", *UPDATES)
        joint, verdict = joint_of(gm), found_inf_node(gm)
        if not joint.gradients:
            return
        named = list(zip(joint.gradients, gradient_nodes(gm), strict=True))
        sharded = [grad for name, grad in named if name in self.sharded]
        equal = [grad for name, grad in named if name not in self.sharded]
        norm, agreed = append(gm, agree, sharded, equal, verdict, self.unit)
        _label(gm, Sent(self.unit.name, "sum", "norm and verdict"))
        change_joint(gm, norm=norm.name)
        if verdict is not None and joint.found_inf is not None:
            outs = outputs(gm)
            outs[joint.found_inf] = agreed
            set_outputs(gm, outs)
        record_done(gm, self.name)
        yield Change("agree", "agree on norm and verdict", norm.name, f"{self.unit.size} ranks")
