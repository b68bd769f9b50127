"""Find values that share storage, and the writes to that storage, from the captured fake tensors.

Before: ``v = h[:, 0]; v += 1``. After: ``h`` and ``v`` share a storage with one write; a cast of ``h`` before the write
must not be used by a reader after it. For operators of other libraries, schemas count too: their fake kernels may
return new memory where the real ones return their argument's. Views of one storage, such as those of
``qkv.chunk(3, -1)``, may have no element in common: ``may_overlap(k, v)`` is False.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.fake_values import adopt_values, captured, is_eligible, tensors
from amp_graph.passes.graph.identify_ops import operations_of, tensor_inputs
from amp_graph.passes.graph.meta_keys import RETURNED
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.storage import storage_key

Steps = tuple[tuple[int, int], ...]  # of a view over its storage: how many, and their distance in bytes


def _place(view: torch.Tensor) -> tuple[int, Steps]:
    """Return the first byte of a storage that a view reads, and its steps."""
    width = view.element_size()
    steps = [(concrete_size(n), concrete_size(d) * width) for n, d in zip(view.shape, view.stride(), strict=True)]
    return concrete_size(view.storage_offset()) * width, ((width, 1), *(s for s in steps if s[0] != 1))


def _length(steps: Steps, below: int | None = None) -> int:
    """Return the number of bytes from the first to the last, over the steps shorter than ``below``."""
    return 1 + sum((count - 1) * step for count, step in steps if below is None or step < below)


def _fits(start: int, steps: Steps, row: int) -> bool:
    """Say whether a view takes the same part of each of its rows of ``row`` bytes."""
    whole = all(step < row or step % row == 0 for _, step in steps)
    return whole and start % row + _length(steps, row) <= row


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two views of one storage may share an element; False only if they certainly do not."""
    if 0 in (*map(concrete_size, a.shape), *map(concrete_size, b.shape)):
        return False
    (start, of_a), (other, of_b) = _place(a), _place(b)
    if _apart(start, _length(of_a), other, _length(of_b)):
        return False
    rows = {step for _, step in (*of_a, *of_b) if step > 1}
    return not any(
        _fits(start, of_a, row)
        and _fits(other, of_b, row)
        and _apart(start % row, _length(of_a, row), other % row, _length(of_b, row))
        for row in rows
    )


def _apart(a: int, a_length: int, b: int, b_length: int) -> bool:
    return a + a_length <= b or b + b_length <= a


MANY = 64  # outputs of one storage up to which overlap is checked pair by pair; more are assumed to overlap
OWN = ("aten", "prims")  # namespaces of torch, whose fake kernels alias as the real ones do


@dataclass(frozen=True)
class Memory:
    """The written storages of a graph.

    ``writers``: the positions (node order) of the writes to each storage. ``leaving``: the storages of which the caller
    holds two overlapping values, and may write to one of them after the graph ran.
    """

    storages: Mapping[Node, frozenset[int]]
    writers: Mapping[int, tuple[int, ...]]
    order: Mapping[Node, int]
    leaving: frozenset[int] = frozenset()

    def is_written(self, node: Node) -> bool:
        """Say whether the storage of the value of ``node`` is written anywhere in the graph."""
        return any(key in self.writers for key in self.storages.get(node, ()))

    def written_after(self, node: Node) -> frozenset[int]:
        """Return the storages of the value of ``node`` that are written after it."""
        at = self.order[node]
        keys = self.storages.get(node, frozenset())
        return frozenset(key for key in keys if any(place > at for place in self.writers.get(key, ())))

    def aliased(self, node: Node) -> dict[Node, frozenset[int]]:
        """Return the inputs that the value of ``node`` aliases, with the storages that may be written after it.

        No cast may come between the two, as a write to one would not reach the other.
        """
        later = self.written_after(node) | self.leaving & self.storages.get(node, frozenset())
        found = {source: later & self.storages.get(source, frozenset()) for source in node.all_input_nodes}
        return {source: keys for source, keys in found.items() if keys}

    def epoch(self, node: Node, reader: Node) -> int:
        """Return the number of writes to the storage of ``node`` before ``reader`` runs."""
        at = self.order[reader]
        return sum(sum(1 for place in self.writers.get(key, ()) if place < at) for key in self.storages.get(node, ()))


def observe(gm: GraphModule, writes: Mapping[Node, Any]) -> Memory:
    """Read aliasing from the captured values' storages, and writes from the operations' schemas.

    ``writes`` has what knows the inputs ``written`` of each ordinary call: a classification, or after the plan a mark.
    Of a call that it lacks no write is seen. Writes of higher-order operators are found in their bodies.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    written = {node: writes[node].written if node in writes else written_inside(gm, node) for node in order}
    storages = _joined({node: _keys(node) for node in order}, frozenset().union(*written.values()))
    writers: dict[int, list[int]] = {}
    for node, targets in written.items():
        for target in targets:
            for key in storages.get(target, ()):
                writers.setdefault(key, []).append(order[node])
    return Memory(storages, {k: tuple(v) for k, v in writers.items()}, order)


def observe_with_caller(gm: GraphModule, writes: Mapping[Node, Any]) -> Memory:
    """Observe, and find storages of which the caller holds two overlapping values, such as an input and an output."""
    memory = observe(gm, writes)
    return replace(memory, leaving=_leaving(gm, memory.storages))


def _leaving(gm: GraphModule, storages: Mapping[Node, frozenset[int]]) -> frozenset[int]:
    shown: dict[int, list[Node]] = {}
    outputs = gm.graph.output_node().all_input_nodes
    for node in outputs:
        for key in storages[node]:
            shown.setdefault(key, []).append(node)
    for node in gm.graph.find_nodes(op="placeholder"):
        for key in storages[node] & shown.keys():
            shown[key].append(node)
    return frozenset(key for key, nodes in shown.items() if len(nodes) > MANY or _overlap(nodes))


def _overlap(nodes: list[Node]) -> bool:
    """Say whether two of several values of one storage may overlap."""
    pairs = ((a, b) for i, a in enumerate(nodes) for b in nodes[:i] if a is not b)
    return any(may_overlap(x, y) for a, b in pairs for x in tensors(captured(a)) for y in tensors(captured(b)))


def written_inside(gm: GraphModule, node: Node) -> frozenset[Node]:
    """Return the inputs that a higher-order operator may write to: all of them if one of its bodies writes to one."""
    if not node_info.is_higher_order(node):
        return frozenset()
    bodies = filter(None, (graph_read(gm, n) for n in node.all_input_nodes))
    writes = "mutation" in getattr(node.target, "__name__", "") or any(map(_writes, bodies))
    return frozenset(n for n in node.all_input_nodes if tensors(captured(n))) if writes else frozenset()


def _writes(body: GraphModule) -> bool:
    """Say whether a call in ``body``, the graph of a higher-order operator, may write to the body's inputs."""
    adopt_values(body)
    given = frozenset().union(*(_keys(n) for n in body.graph.find_nodes(op="placeholder")))
    written = {s for n in body.graph.nodes for s in (*node_info.written_by_name(n), *written_inside(body, n))}
    return any(not keys or keys & given for keys in map(_keys, written))


def _keys(node: Node) -> frozenset[int]:
    keys = (storage_key(t) for t in tensors(captured(node)))
    return frozenset(key for key in keys if key is not None)


def _joined(storages: dict[Node, frozenset[int]], written: frozenset[Node]) -> dict[Node, frozenset[int]]:
    """Return ``storages`` with one name for those that are the same by a schema, or may be the same in another call."""
    names: dict[int, int] = {}

    def name(key: int) -> int:
        while key in names:
            key = names[key]
        return key

    def join(keys: Iterable[int]) -> None:
        one, *others = {name(key) for key in keys} or (0,)
        names.update(dict.fromkeys(others, one))

    for node, keys in storages.items():
        if RETURNED in node.meta:
            join((*keys, *node.meta[RETURNED]))
        for source in _aliased_by_schema(node):
            join((*keys, *storages.get(source, ())))
    mine = frozenset(name(key) for node in _given(storages) for key in storages[node])
    if any(name(key) in mine for node in written for key in storages.get(node, ())):
        join(mine)
    if not names:
        return storages
    return {node: frozenset(map(name, keys)) for node, keys in storages.items()}


def _given(nodes: Iterable[Node]) -> list[Node]:
    """Return the fp32 input tensors of a call, without parameters and buffers.

    Dynamo does not guard on which of them share memory. A graph that was captured for separate tensors also runs for a
    tensor and a view of it, so a write to one may write to all.
    """
    return [n for n in nodes if n.op == "placeholder" and is_eligible(captured(n)) and not _is_held(n)]


def _is_held(node: Node) -> bool:
    """Say whether an input of a graph is a parameter or buffer of the module that was captured."""
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    source = str(name() if callable(name) else name)
    parameter = isinstance(captured(node), torch.nn.Parameter)
    return parameter or "._parameters[" in source or "._buffers[" in source


def _aliased_by_schema(node: Node) -> list[Node]:
    """Return the inputs that the value of ``node`` may alias, by schemas that are not torch's own."""
    foreign = [o for o in operations_of(node) if o.op.namespace not in OWN]
    inputs = tensor_inputs(node) if foreign else []
    return [inputs[i] for o in foreign for name in node_info.returned_arguments(o.op) for i in o.operands(name)]
