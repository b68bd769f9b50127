"""Make the gradients of embedding tables in reused memory.

Before: ``embedding_bag(ids, table, mode="sum")``.
After: ``table_rows(table, ids, None, True)``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.meta_keys import REGION, TRANSFORM
from amp_graph.passes.memory.gradient_buffers import POOL, table_rows
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.torch_compat.fake import numel
from amp_graph.passes.torch_compat.storage import storage_key

SIGNATURES = {f: inspect.signature(f) for f in (F.embedding, F.embedding_bag)}
# What a call may pass besides its operands; anything else changes the gradient or the result.
PLAIN: dict[str, Any] = {
    "max_norm": None, "scale_grad_by_freq": False, "sparse": False, "mode": "sum", "offsets": None,
    "per_sample_weights": None, "include_last_offset": False,
}  # fmt: skip


FEW = "the tables are small compared with what is computed: their gradients are not kept"
SHARED = "another operation reads the table: autograd adds up the gradients in memory that is not kept"


@dataclass(frozen=True)
class ReuseEmbeddingGradients(Pass):
    """Replaces ``embedding`` and ``embedding_bag`` with ``table_rows`` when a parameter's table trains.

    Law: a dense fp32 table that is large compared with what the graph computes, and that nothing else reads; plain
    rows, or sums of bags of one length. Exactness: forward bit-exact, gradients rounding-equal: fp32 sums in the order
    of the ids.
    """

    options: PipelineOptions

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Visit every embedding, once the size of all tables is known."""
        found = [(node, plain_arguments(node)) for node in gm.graph.nodes if _reads_table(node)]
        given = {node: arguments for node, arguments in found if arguments is not None}
        skipped = {node: "its gradient is not a plain sum of rows" for node, a in found if a is None}
        tables = _bytes(arguments["weight"] for arguments in given.values())
        computed = _bytes(n for n in gm.graph.nodes if n.op != "placeholder")
        if not reusing_gradients_is_profitable("cpu", tables, computed):
            skipped |= dict.fromkeys(given, FEW)
        else:
            skipped |= {node: SHARED for node, a in given.items() if _is_read_elsewhere(a["weight"])}
        for node, reason in skipped.items():
            yield Skip(node.name, reason)
        kept = {node: a for node, a in given.items() if node not in skipped}
        if kept:
            POOL.reserve(Counter(tuple(value(a["weight"]).shape) for a in kept.values()), self.options.user)
        for node, arguments in kept.items():
            bags = node.target is F.embedding_bag
            node.args = (arguments["weight"], arguments["input"], arguments["padding_idx"], bags)
            node.target, node.kwargs = table_rows, {}
            yield Change(self.name, "reused memory", node.name, "its table's gradient is large")


def _is_read_elsewhere(table: Node) -> bool:
    """Say whether autograd adds the gradient of another operation to the table's: a head that is tied to it.

    The sum is in the memory of the other gradient. What is kept for the table's would only stay beside it.
    """
    return any(tensors(value(reader)) and reader.target not in SIGNATURES for reader in table.users)


def _reads_table(node: Node) -> bool:
    """Say whether ``node`` is an embedding in training that reads a parameter directly."""
    if node.op != "call_function" or node.target not in SIGNATURES or not {REGION, TRANSFORM}.isdisjoint(node.meta):
        return False
    weight = SIGNATURES[node.target].bind(*node.args, **node.kwargs).arguments["weight"]
    table = captured(weight) if isinstance(weight, Node) and weight.op == "placeholder" else None
    if not is_trained(node) or not isinstance(table, torch.nn.Parameter) or not table.requires_grad:
        return False
    return table.dtype == torch.float32 and table.device.type == "cpu" and table.is_contiguous()


def plain_arguments(node: Node) -> dict[str, Any] | None:
    """Return the arguments of a call of ``SIGNATURES`` whose gradient is a sum of rows, else None."""
    assert callable(node.target), "asked of calls"
    bound = SIGNATURES[node.target].bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if any(given[name] != plain for name, plain in PLAIN.items() if name in given):
        return None
    ids = value(given["input"]) if isinstance(given["input"], Node) else None
    if not isinstance(ids, torch.Tensor) or (node.target is F.embedding_bag and ids.dim() != 2):
        return None
    return given


def _bytes(nodes: Any) -> int:
    """Return the bytes of the values of ``nodes``, counting each storage once."""
    found = {storage_key(t): t for node in nodes for t in tensors(value(node))}
    return sum(t.element_size() * numel(t) for t in found.values())


# Bytes of gradients below which the process keeps freed memory.
LEAST_TABLES = 1 << 22


def reusing_gradients_is_profitable(device: str, tables: int, computed: int) -> bool:
    """Say whether gradients of embedding ``tables`` (bytes) should be written to memory that is reused across steps.

    CPU: gradients of a few megabytes are returned to the system when freed, and paged in again in each step: with 41 MB
    of tables, a step of DLRM took 1.5 times as long. Reuse adds at most ``computed`` bytes (all results of the graph)
    to the peak of a step, as all gradients exist at its end. Language models compute more than their tables.
    """
    return device == "cpu" and tables >= max(LEAST_TABLES, computed)
