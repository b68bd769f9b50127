"""Average gradients over the ranks inside the graph, in buckets that overlap with backward, and clip them.

Before: DDP's hooks, outside of any graph. After: one ``_c10d_functional.all_reduce`` a bucket, started right behind
the last gradient that it holds, and waited for before the update. Gradients are clipped by their norm and by value as
``torch.nn.utils`` does it, operation by operation.
Source: torch/nn/parallel/distributed.py (buckets), torch/distributed/_functional_collectives.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, PassError
from amp_graph.passes.loss_scaling.append import StateInput, add_inputs, append
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.loss_scaling.joint_graph import (
    UPDATES,
    JointPass,
    change_joint,
    gradient_nodes,
    joint_of,
    node_named,
    record_done,
    refuse_behind,
    set_gradients,
)
from amp_graph.passes.loss_scaling.scale_loss import own_gradients
from amp_graph.passes.torch_compat.operators import (
    collectives,
    foreach_mul_,
    foreach_norm,
)

BUCKET = 25 * 2**20  # bytes, as DDP's
# What fills a bucket, and its sum.
MOVES = {"add", "cat", "view", "_unsafe_view", "reshape", "div", "_to_copy", "clone", "new_ones", "all_reduce"}


def average(
    grads: Sequence[Tensor], group: str, size: int, dtype: torch.dtype | None, absent: Collection[int] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the averages of ``grads`` over the ranks of ``group``; traced into a graph, or run as it is.

    Gradients are divided before they are added, so that a sum overflows no earlier than an average would. ``absent``:
    the numbers of zeros in the place of gradients that this rank does not have. For each of them, in order, the second
    list has 1.0 where no rank has one, else 0.0.
    """
    made: list[Tensor] = list(grads)
    missing: dict[int, Tensor] = {}
    buckets = _buckets(grads)
    started = [_start([(grads[i], i not in absent) for i in bucket], group, size, dtype) for bucket in buckets]
    for bucket, flat in zip(buckets, started, strict=True):
        done = collectives.wait_tensor(flat)
        *parts, present = done.split([*(grads[i].numel() for i in bucket), len(bucket)])
        for n, (i, part) in enumerate(zip(bucket, parts, strict=True)):
            made[i] = laid_out_as(grads[i], part.view(grads[i].shape).to(grads[i].dtype))
            if i in absent:
                missing[i] = (present[n] == 0).float()
    return made, [missing[i] for i in absent]


def _start(given: Sequence[tuple[Tensor, bool]], group: str, size: int, dtype: torch.dtype | None) -> Tensor:
    """Start the sum of a bucket, each gradient with whether this rank has it, which is one more element."""
    grads = [grad for grad, _ in given]
    present = [grads[0].new_ones(len(given))]
    if not all(here for _, here in given):
        present = [grads[0].new_full((1,), float(here)) for _, here in given]
    flat = torch.cat([*(g.reshape(-1) for g in grads), *present]) / size
    return collectives.all_reduce(flat.to(dtype or flat.dtype), "sum", group)


def _buckets(grads: Sequence[Tensor]) -> list[list[int]]:
    """Return the gradients' numbers in buckets of one dtype, last first: the order in which backward makes them."""
    found: list[list[int]] = []
    size = 0
    for i in reversed(range(len(grads))):
        grad = grads[i]
        if not found or size > BUCKET or grads[found[-1][0]].dtype != grad.dtype:
            found.append([])
            size = 0
        found[-1].append(i)
        size += grad.numel() * grad.element_size()
    return found


@dataclass(frozen=True)
class AverageOverRanks(JointPass):
    """Averages the gradients of a joint graph over the ``size`` ranks of the process group named ``group``.

    dtype: what travels; None for the gradients' own. without: the parameters whose gradients were reduced before.
    absent: the names of gradients that are zeros, as the loss of this rank does not depend on their parameters;
    ``JointGraph.skips`` then says whether that of any rank does.

    Law: each gradient is the mean of the ranks'. Exactness: approximate, the sum's order is the network's. An infinite
    gradient of one rank is infinite on all: run it before ``CheckFiniteAndUnscale``, and all ranks agree.
    """

    group: str
    size: int
    dtype: torch.dtype | None = None
    without: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Append the all-reduces, then move each up to where its last gradient is made."""
        # A rank that has looked for infinite gradients must know of those of all others.
        refuse_behind(gm, self.name, "check-finite-and-unscale", "clip-gradients", *UPDATES)
        grads = gradient_nodes(gm)
        names = list(joint_of(gm).gradients)
        own = [i for i, name in enumerate(names) if name not in self.without]
        if not own:
            return
        absent = {n: names[i] for n, i in enumerate(own) if names[i] in self.absent}
        made, skips = append(gm, average, [grads[i] for i in own], self.group, self.size, self.dtype, tuple(absent))
        for i, node in zip(own, made, strict=True):
            grads[i] = node
        set_gradients(gm, grads)
        change_joint(gm, skips={name: node.name for name, node in zip(absent.values(), skips, strict=True)})
        record_done(gm, self.name)
        start_early(gm)
        yield Change("average", "average gradients", made[0].name, f"over {self.size} ranks")


def start_early(gm: GraphModule) -> None:
    """Move each all-reduce, and what only feeds it, right behind the last value that it needs."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if node.target is collectives.all_reduce.default:
            _raise(node, place)


def _raise(node: Node, place: dict[Node, int]) -> None:
    """Move ``node`` up, after its inputs that feed nothing else than buckets."""
    for source in node.all_input_nodes:
        if all(map(_only_moves, source.users)) and source.op == "call_function" and _only_moves(source):
            _raise(source, place)
    last = max(node.all_input_nodes, key=lambda n: place[n])
    last.append(node)
    place[node] = place[last]


def _only_moves(node: Node) -> bool:
    """Say whether ``node`` is a part of filling a bucket, or its sum: what copies, casts, divides or adds gradients."""
    return getattr(node.target, "__name__", "").split(".")[0] in MOVES


def clip_(
    grads: Sequence[Tensor],
    norm: float | None,
    value: float | None,
    into: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Clip ``grads`` in place, by their norm first; None leaves one of both out. into: 0-d, gets the norm as it was.

    total: their norm where other ranks have parts of them; None computes it.
    """
    grads = list(grads)
    if norm is not None:
        if total is None:
            total = torch.linalg.vector_norm(torch.stack(list(foreach_norm(grads, 2.0))), 2.0)
        foreach_mul_(grads, torch.clamp(norm / (total + 1e-6), max=1.0))
        if into is not None:
            into.copy_(total)
    if value is not None:
        for grad in grads:
            grad.clamp_(-value, value)


@dataclass(frozen=True)
class ClipGradients(JointPass):
    """Clips the gradients of a joint graph in place. norm: of all together; value: of each element; None: not at all.

    into: an input, 0-d, that gets their norm before it is clipped.

    Law: as ``clip_grad_norm_``, then ``clip_grad_value_``. Exactness: bit-exact.
    """

    norm: float | None = None
    value: float | None = None
    into: StateInput | None = None

    adds_inputs: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
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
            return
        grads = own_gradients(gm)
        into = add_inputs(gm, [self.into])[0] if self.into is not None else None
        total = node_named(gm, joint.norm) if joint.norm else None
        append(gm, clip_, grads, self.norm, self.value, into, total)
        record_done(gm, self.name)
        yield Change("clip", "clip gradients", grads[0].name, f"to a {' and a '.join(limits)}")
