"""What a rewritten graph is predicted to take, as a multiple of the same graph in full precision.

Before: ``f32 -> cast -> linear(bf16) -> cast -> f32``. After: 1.4 on this machine: the casts cost more than they gain.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from amp_graph.passes.classify import CLASSIFIED
from amp_graph.passes.identify_ops import is_part
from amp_graph.passes.insert_casts import CAST
from amp_graph.passes.keep_weight_copies import is_kept
from amp_graph.passes.machine import Machine
from amp_graph.passes.node_value import captured, tensors
from amp_graph.passes.plan_precision import MARK
from amp_graph.passes.regions import is_trained
from amp_graph.passes.work import cast_picoseconds, picoseconds, work_of

FULL = "float32"


def predicted_ratio(nodes: Iterable[Node], machine: Machine, low: torch.dtype) -> float | None:
    """Return the predicted time of planned ``nodes``, forward and backward, over that in full precision.

    Passes that replace kernels are not counted, casts are. None where no operation is low, or none takes time.
    """
    dtype = str(low).removeprefix("torch.")
    planned = in_full = 0
    has_low = False
    for node in nodes:
        mark, known = node.meta.get(MARK), node.meta.get(CLASSIFIED)
        if CAST in node.meta:
            planned += _of_cast(node, machine, dtype)
        elif mark is not None and known is not None and not is_part(node) and tensors(captured(node)):
            is_low = mark.precision == "low"
            has_low |= is_low
            work = work_of(node, known[2], map(_uncast, node.all_input_nodes))
            full = picoseconds(work, machine, FULL)
            in_full += full
            planned += picoseconds(work, machine, dtype) if is_low else full
    return planned / in_full if has_low and in_full else None


def _of_cast(node: Node, machine: Machine, dtype: str) -> int:
    """Return what a cast takes, and that of its gradient; without gradients, one of a kept weight is made no more."""
    source = _uncast(node)
    trained = is_trained(source) and (source.op != "placeholder" or any(map(is_trained, node.users)))
    if is_kept(node) and not trained:
        return 0
    return cast_picoseconds(source, machine, dtype) * (1 + trained)


def _uncast(node: Node) -> Node:
    source = node.args[0] if CAST in node.meta else node
    assert isinstance(source, Node), "a cast has a source"
    return source
