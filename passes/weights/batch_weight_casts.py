"""Batch the casts of many parameters into few calls.

Before: ``a = w1.bfloat16(); b = w2.bfloat16()``. After: ``low = low_weights(w1, w2); a, b = low``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.profitability.thresholds import (
    few_calls_are_profitable,
    keeping_between_updates_is_profitable,
)
from amp_graph.passes.torch_compat.dispatch import is_wrapper
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.storage import bytes_of
from amp_graph.passes.weights.cache_weight_casts import casts_of_parameters
from amp_graph.passes.weights.cast_cache import WeightCopies
from amp_graph.passes.weights.foreach_casts import Format, WeightGroup, low_weight
from amp_graph.passes.weights.group_copies import GroupCopies
from amp_graph.passes.weights.plan_copy_lifetimes import saved_bytes

# Casts: one call for fewer takes the host as long, because with gradients it is an autograd node written in Python.
# Estimated from a CPU's times without the copies, forward and backward: 15 us a cast and 60 us + 15 us a cast of a
# group, plus 4 us for each launch. Time over that of the casts alone: 6 casts 1.07, 8 casts 0.96, 12 casts 0.88.
LEAST, LEAST_TRAINED = 3, 8
# Bytes of weights per group. Like a DistributedDataParallel bucket, a group upcasts and returns none of its gradients
# before the last one has arrived. A larger group would delay the all-reduce of these gradients.
MOST = 25 << 20
# The same without a process group, where only the group's low-precision gradients wait, half of these bytes. A group
# is closed earlier: as soon as it has ``MOST`` bytes and ``ENOUGH`` casts. 12 weights of width 768 (BERT) have 28 MB.
MOST_ALONE, ENOUGH = 256 << 20, 12


@dataclass(frozen=True)
class BatchWeightCasts(Pass):
    """Casts parameters together, and in backward their gradients, when it is profitable.

    Law: the graph neither writes to these parameters, nor returns a cast, nor switches gradients on or off; the members
    of a group get gradients from the same outputs. Exactness: bit-exact, gradients included. In backward, a group's
    gradients become available only when its last one does.
    """

    copies: WeightCopies
    device: str
    name: ClassVar[str] = "batch-weight-casts"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every inserted cast of a parameter."""
        if not few_calls_are_profitable(self.device) or any(_switches_gradients(n) for n in gm.graph.nodes):
            return PassResult(gm)
        may: dict[torch.device, list[Node]] = {}
        for node, reason in casts_of_parameters(gm, self.copies.dtype):
            if not reason and _fits(node):
                may.setdefault(value(node).device, []).append(node)
        changes = []
        reached = outputs_reached(gm, observe(gm, marks(gm))) if may and torch.is_grad_enabled() else {}
        groups = list(chain.from_iterable(_in_groups(on_one_device, reached) for on_one_device in may.values()))
        keeps, why = self._keeps(gm, groups) if torch.is_grad_enabled() else (False, "")
        for together in groups:
            trains = torch.is_grad_enabled() and any(map(is_trained, together))
            if len(together) >= (LEAST_TRAINED if trains else LEAST):
                self._group(gm, together, keeps and trains)
                told = f"with {len(together) - 1} others{why if trains else ''}"
                changes += [Change(self.name, "grouped", n.name, told) for n in together]
        return PassResult(gm, tuple(changes))

    def _keeps(self, gm: GraphModule, groups: list[list[Node]]) -> tuple[bool, str]:
        """Say whether the copies of groups that train are kept between the micro-batches of an update, and why."""
        trained = [g for g in groups if len(g) >= LEAST_TRAINED and any(map(is_trained, g))]
        if not trained:
            return False, ""
        sizes = [sum(concrete_size(bytes_of(captured(n.all_input_nodes[0]))) for n in group) for group in trained]
        casts, arriving = sum(sizes) * 3 // 2, max(sizes) * 3 // 2
        if self.copies.when is None:
            return True, "; kept between the micro-batches of an update: weight_copies=true"
        saved = saved_bytes(gm, {n for group in groups for n in group})
        keeps = keeping_between_updates_is_profitable(self.device, casts, saved, arriving)
        told = "kept between the micro-batches of an update" if keeps else "cast at each call"
        return keeps, f"; {told}: {casts / 2**20:.4g} MB of casts, {saved / 2**20:.4g} MB of activations"

    def _group(self, gm: GraphModule, together: list[Node], keeps: bool) -> None:
        group = WeightGroup(self.copies.dtype, [_format(n) for n in together])
        if keeps:
            group.between = GroupCopies(self.copies.check if self.copies.checked else None)
        self.copies.groups.add(group)
        with gm.graph.inserting_before(together[0]):
            made = gm.graph.call_function(group.read, tuple(n.args[0] for n in together))
        made.meta["val"] = tuple(value(n) for n in together)
        for i, node in enumerate(together):
            node.op, node.target = "call_function", low_weight
            node.args, node.kwargs = (node.args[0], made, i), {}


def _in_groups(casts: list[Node], reached: Mapping[Node, int]) -> Iterator[list[Node]]:
    """Yield groups of casts on one device: without gradients all; else frozen and trained apart, of limited size.

    Weights that get gradients from different outputs are in different groups: one might get none, and its hooks would
    be called with None.
    """
    if not torch.is_grad_enabled():
        yield casts
        return
    weights: dict[Node, Any] = {node: captured(node.all_input_nodes[0]) for node in casts}
    yield [n for n in casts if not weights[n].requires_grad]
    trained = [n for n in casts if weights[n].requires_grad]
    for outputs in sorted({reached[n] for n in trained} - {0}):
        yield from _of_limited_size([n for n in trained if reached[n] == outputs], weights)


def _of_limited_size(casts: Sequence[Node], weights: Mapping[Node, Any]) -> Iterator[list[Node]]:
    """Yield ``casts`` in order, in groups of at most ``MOST`` bytes; without a process group, of ``MOST_ALONE``."""
    alone = not has_process_group()
    group: list[Node] = []
    size = 0
    for node in casts:
        more = size + bytes_of(weights[node])
        enough = not alone or len(group) >= ENOUGH
        if group and more > (MOST if enough else MOST_ALONE):
            yield group
            group, more = [], bytes_of(weights[node])
        group.append(node)
        size = more
    yield group


def has_process_group() -> bool:
    """Say whether several processes may train the model together, which all-reduce gradients as these appear."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def outputs_reached(gm: GraphModule, memory: Memory) -> dict[Node, int]:
    """Return for each node the set of graph outputs that hand it gradients, as a bit mask."""
    sharing: dict[int, list[Node]] = {}
    for node, keys in memory.storages.items():
        for key in keys:
            sharing.setdefault(key, []).append(node)
    found: dict[Node, int] = {}
    for i, given in enumerate(gm.graph.output_node().all_input_nodes):
        found[given] = 1 << i
    for node in reversed(gm.graph.nodes):
        readers = set(node.users)
        for key in memory.storages[node]:
            if memory.order[node] in memory.writers.get(key, ()):  # what it wrote is also read under other names
                readers.update(u for n in sharing[key] for u in n.users if node < u)
        bits = found.get(node, 0) | functools.reduce(operator.or_, (found[u] for u in readers if u.op != "output"), 0)
        found[node] = bits if is_trained(node) else 0
    return found


def _fits(cast: Node) -> bool:
    """Say whether ``cast`` may run as soon as its parameter exists, and changes only precision and layout."""
    elsewhere = not {REGION, CHECKPOINT}.isdisjoint(cast.meta) or is_wrapper(captured(cast.all_input_nodes[0]))
    return not elsewhere and set(cast.kwargs) <= {"memory_format"}


def _format(cast: Node) -> Format:
    found: Format = cast.kwargs.get("memory_format")  # type: ignore[assignment]
    return found


def _switches_gradients(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_set_grad_enabled"
