"""Gather the shards of parameters inside a joint graph, a unit at a time, right before the unit's first reader.

Before: an input of full size for each weight, and casts of it. After: inputs that are this rank's shards, casts of
these, and for each unit one ``all_gather_into_tensor`` of their bytes, of all dtypes, started a unit ahead.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, PassError, Writes
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.meta_keys import INPUT, SENT
from amp_graph.passes.graph.node_info import at_line, is_view
from amp_graph.passes.loss_scaling.append import append, mode_of
from amp_graph.passes.loss_scaling.joint_graph import JointPass, input_nodes, joint_of, like_in, node_named
from amp_graph.passes.sharding.round_lookups import EMBEDDING
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.operators import TO_COPY, UNSAFE_VIEW, collectives


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together.

    group, size: the process group that has a shard on each rank. replicas: the group of the ranks that have the same
    shard, or "". ranks: how many ranks average gradients, in both. reshards: whether what forward gathered is freed
    behind it, and gathered again for backward. reduce_dtype: in which gradients are summed; None for fp32.
    """

    name: str
    group: str
    size: int
    ranks: int
    replicas: str = ""
    reshards: bool = True
    reduce_dtype: torch.dtype | None = None


class Sent(NamedTuple):
    """What a collective sends: for which unit, and "gather", "reduce" to shards, or "sum" over ranks; of what.

    parts: the names of parameters, the dtype in which each is gathered, whether it was cast for that, and whether
    embeddings look up in it.
    """

    unit: str
    direction: str
    what: str = ""
    parts: tuple[tuple[str, torch.dtype, bool, bool], ...] = ()


Shard = tuple[int, Tensor]  # of an input: the number of its unit, and the rows that this rank has
Whole = tuple[torch.Size, torch.dtype]  # of what is gathered


def rows_of(shape: Sequence[int], size: int) -> int:
    """Return how many rows each rank sends of a tensor: those of the first rank, to which others are padded."""
    return -(-shape[0] // size)


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return ``tensor`` with rows of zeros behind its own, ``rows`` in all."""
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def gather(shards: Sequence[Tensor], wholes: Sequence[Whole], unit: Unit) -> Tensor:
    """Start one gather of the bytes of ``shards``, each in the dtype of its whole, and padded."""
    pairs = zip(shards, wholes, strict=True)
    rows = [padded(one.to(dtype), rows_of(shape, unit.size)) for one, (shape, dtype) in pairs]
    parts = [one.reshape(-1).view(torch.uint8) for one in rows]
    return collectives.all_gather_into_tensor(torch.cat(parts), unit.size, unit.group)


def gathered(flat: Tensor, wholes: Sequence[Whole], unit: Unit) -> list[Tensor]:
    """Wait for a gather, and return the whole tensors in it, of these shapes and dtypes."""
    counts = [rows_of(shape, unit.size) * prod(shape[1:]) * dtype.itemsize for shape, dtype in wholes]
    ranks = collectives.wait_tensor(flat).view(unit.size, sum(counts))
    found, start = [], 0
    for (shape, dtype), count in zip(wholes, counts, strict=True):
        part = ranks.narrow(1, start, count).reshape(-1).view(dtype)
        found.append(part.view(rows_of(shape, unit.size) * unit.size, *shape[1:]).narrow(0, 0, shape[0]))
        start += count
    return found


@dataclass
class Gather:
    """One gather of a unit: the first node that reads of it, and the readers of its inputs and of casts of them.

    again: for backward, of what forward has freed.
    """

    unit: int
    first: Node
    again: bool
    readers: dict[Node, list[Node]] = field(default_factory=dict)

    def wanted(self, casts: Mapping[Node, Node]) -> list[Node]:
        """Return the inputs to gather, and the casts of others; the largest numbers first, so that all are aligned."""
        sources = {node: casts.get(node, node) for node in self.readers}
        apart = [node for node, source in sources.items() if node is source or source not in sources]
        once = {(sources[node], value(node).dtype): node for node in apart}
        return sorted(once.values(), key=lambda node: -value(node).dtype.itemsize)


@dataclass(frozen=True)
class ShardParameters(JointPass):
    """Turns inputs of a joint graph into shards, by name of input, and gathers the units that it reads.

    A unit is gathered once for forward and, if it ``reshards``, once more for backward, which then reads no memory of
    forward's. A gather starts where the unit before is first read. An input that is read through a cast to low
    precision is cast before it is gathered; one that is also read as it is, is gathered once, as it is.

    Law: what nodes read is what the inputs were, or casts of them. Exactness: bit-exact.
    """

    units: Sequence[Unit] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)

    writes: ClassVar[Writes] = Writes.KEPT

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Change the inputs, and put the gathers in."""
        known, mode = input_nodes(gm), mode_of(gm)
        inputs = {known[name]: shard for name, shard in self.shards.items()}
        _refuse_writes(gm, inputs)
        self._derive_again(gm, inputs)
        casts = _casts_of(gm, inputs)
        gathers = self._gathers(gm, inputs, casts)
        wholes = {node: (value(node).shape, value(node).dtype) for node in (*inputs, *casts)}
        owns = [one.wanted(casts) for one in gathers]
        for node, (_, local) in inputs.items():
            node.meta["val"] = like_in(mode, local)
        before = None
        for one, own in zip(gathers, owns, strict=True):
            _put_in(gm, one, own, wholes, casts, self.units[one.unit], before or one.first)
            before = one.first
            what = f"{len(own)} of {self.units[one.unit].name or 'the whole model'}"
            yield Change("gather", "gather shards", one.first.name, what)
        for node in casts:
            gm.graph.erase_node(node)

    def _gathers(self, gm: GraphModule, inputs: Mapping[Node, Shard], casts: Mapping[Node, Node]) -> list[Gather]:
        """Return the gathers that readers of ``inputs`` and ``casts`` need, in the order of their first readers."""
        seed, backward = node_named(gm, joint_of(gm).seed), False
        found: dict[tuple[int, bool], Gather] = {}
        for node in gm.graph.nodes:
            backward = backward or node is seed
            for source in node.all_input_nodes if node not in casts else ():
                shard = inputs.get(casts.get(source, source))
                if shard is not None:
                    key = shard[0], backward and self.units[shard[0]].reshards
                    found.setdefault(key, Gather(shard[0], node, key[1])).readers.setdefault(source, []).append(node)
        return list(found.values())

    def _derive_again(self, gm: GraphModule, inputs: Mapping[Node, Shard]) -> None:
        """Let backward compute views and casts of resharded inputs itself, of which forward's are freed."""
        seed, backward = node_named(gm, joint_of(gm).seed), False
        derived = {node for node, (unit, _) in inputs.items() if self.units[unit].reshards}
        again: dict[Node, Node] = {node: node for node in derived}
        for node in list(gm.graph.nodes):
            backward = backward or node is seed
            if not backward and _derives(node) and derived.issuperset(node.all_input_nodes):
                derived.add(node)
            for source in node.all_input_nodes if backward else ():
                if source in derived:
                    node.replace_input_with(source, _copied(gm, source, node, again))


def _casts_of(gm: GraphModule, inputs: Mapping[Node, Shard]) -> dict[Node, Node]:
    """Return the casts of ``inputs`` to lower precision, and what they cast."""
    found = {}
    for node in gm.graph.find_nodes(op="call_function", target=TO_COPY):
        source = node.args[0]
        if source in inputs and node.kwargs.keys() == {"dtype"} and value(node).itemsize < value(source).itemsize:
            found[node] = source
    return found


def _derives(node: Node) -> bool:
    """Say whether ``node`` is a view or a cast of what it reads."""
    op = node.target
    known = isinstance(op, OpOverload) and (is_view(op) or op in (TO_COPY, UNSAFE_VIEW))
    return known and bool(node.all_input_nodes)


def _copied(gm: GraphModule, node: Node, before: Node, again: dict[Node, Node]) -> Node:
    """Return a copy of ``node``, and of what it is derived from, which is put ``before`` a node if there is none."""
    if node not in again:
        sources = {source: _copied(gm, source, before, again) for source in node.all_input_nodes}
        with gm.graph.inserting_before(before):
            again[node] = gm.graph.node_copy(node, lambda source: sources[source])
    return again[node]


def _put_in(
    gm: GraphModule,
    one: Gather,
    own: Sequence[Node],
    wholes: Mapping[Node, Whole],
    casts: Mapping[Node, Node],
    unit: Unit,
    before: Node,
) -> None:
    """Start a gather of ``own`` before a node, wait for it where it is read, and let its readers read it."""
    told = [wholes[node] for node in own]
    sources = [casts.get(node, node) for node in own]
    flat = append(gm, gather, sources, told, unit, before=before)
    tables = {casts.get(node, node) for node, readers in one.readers.items() for n in readers if n.target is EMBEDDING}
    parts = [
        (source.meta.get(INPUT, node.name), wholes[node][1], node in casts, source in tables)
        for node, source in zip(own, sources, strict=True)
    ]
    flat.meta[SENT] = Sent(unit.name, "gather", "for backward: " * one.again, tuple(parts))
    found = append(gm, gathered, flat, told, unit, before=one.first)
    whole = {(source, dtype): made for source, (_, dtype), made in zip(sources, told, found, strict=True)}
    for node, readers in one.readers.items():
        source, dtype = casts.get(node, node), wholes[node][1]
        if (source, dtype) not in whole:
            whole[source, dtype] = append(gm, Tensor.to, whole[source, wholes[source][1]], dtype, before=one.first)
        instead = whole[source, dtype]
        for reader in readers:
            reader.replace_input_with(node, instead)


def _refuse_writes(gm: GraphModule, inputs: Mapping[Node, Shard]) -> None:
    """Raise PassError where a graph writes to one of ``inputs``: it would write to what was gathered."""
    lives = Lifetimes.of(gm)
    for node in gm.graph.nodes:
        found = lives.memory_written_by(node).intersection(inputs)
        if found:
            name = next(iter(found)).meta.get(INPUT)
            raise PassError(
                f"pass shard-parameters: forward writes to {name}, which is sharded{at_line(node)}\n"
                "  legal: writes to buffers, and to parameters that no unit shards\n"
                "  fix:   register it as a buffer, or fully_shard(..., ignored_params={that parameter})"
            )
