"""Add the gradients of rows to the other gradient of a table that is tied: it is an embedding and a head.

Before: ``add(low.float(), embedding_dense_backward(grad, ids, ...))``, a table of zeros, one in fp32, and their sum.
After: ``add_rows(low, ids, grad)``, which an update by element does not call: it reads the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.joint_graph import gradient_nodes, set_gradients
from amp_graph.passes.memory.gradient_buffers import TABLE_GRADIENT
from amp_graph.passes.step.add_rows import ADD_ROWS
from amp_graph.passes.torch_compat.fake import is_contiguous

ATEN: Any = torch.ops.aten
EMBEDDINGS = (ATEN.embedding_dense_backward.default, TABLE_GRADIENT)
ROWS_PER_READ = 4  # with 8 rows of a table for each that is read, a step takes 0.85 of the time, with 64 0.69


@dataclass(frozen=True)
class RowGradients(Pass):
    """Replaces a sum of gradients of embeddings and one other of their table with ``add_rows``, if few rows are read.

    Law: fp32 gradients of embeddings on the CPU, which are added to the other in fp32. Exactness: rounding-equal.
    """

    name: ClassVar[str] = "row-gradients"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every gradient."""
        found, changes, lives = gradient_nodes(gm), [], Lifetimes.of(gm)
        for i, total in enumerate(found):
            parts = list(_parts(total))
            reads = [n for n in parts if n.target in EMBEDDINGS and not any(n.args[4:])]
            others = [_narrowest(n) for n in parts if n not in reads]
            if len(others) != 1 or not _fits(total, reads, others[0]) or not _stay(gm, reads, others[0], lives):
                continue
            given, paddings = [(n.args[0], n.args[1]) for n in reads], [n.args[3] for n in reads]
            found[i] = append(gm, _joined, others[0], given, paddings)
            set_gradients(gm, found)
            _erase(gm, total)
            changes.append(Change(self.name, "rows", found[i].name, f"{len(reads)} embeddings of one table"))
        return PassResult(gm, tuple(changes))


def _parts(total: Node) -> Iterator[Node]:
    """Yield the summands of ``total``, also of sums among these that nothing else reads."""
    added = total.all_input_nodes if total.target is ATEN.add.Tensor and not total.kwargs else []
    if len(added) < 2 or len(total.users) > 1 or any(value(n).shape != value(total).shape for n in added):
        yield total
        return
    for node in added:
        yield from _parts(node)


def _narrowest(dense: Node) -> Node:
    """Return what ``dense`` casts up, if that is all it does: an update casts by itself."""
    source = dense.all_input_nodes[0] if dense.target is ATEN._to_copy.default else dense
    return source if value(source).dtype in HALVES else dense


def _fits(total: Node, reads: Sequence[Any], dense: Node) -> bool:
    """Say whether all is on the CPU in fp32 or, of ``dense``, lower, and few rows are read."""
    table, count = value(total), sum(value(n.args[1]).numel() for n in reads)
    full = [value(n) for read in reads for n in (read, read.args[0], total)]
    return (
        all(type(n) is int for n in (count, *table.shape))
        and 0 < count * ROWS_PER_READ <= len(table)
        and table.device.type == "cpu"
        and is_contiguous(table)
        and all(t.dtype == torch.float32 for t in full)
        and value(dense).dtype in (*HALVES, torch.float32)
    )


def _stay(gm: GraphModule, reads: Sequence[Any], dense: Node, lives: Lifetimes) -> bool:
    """Say whether what is read now can be read at the end: the graph made it, and does not write to it."""
    made = [dense, *(n.args[0] for n in reads)]
    kept = all(root.op == "call_function" for n in made for root in lives.memory(n))
    end = gm.graph.output_node()
    return kept and not any(lives.is_written_between(n, n, end) for n in (*made, *(n.args[1] for n in reads)))


def _joined(dense: Tensor, reads: Sequence[tuple[Tensor, Tensor]], paddings: Sequence[int]) -> Tensor:
    rows, ids = [], []
    for (grad, read), padding in zip(reads, paddings, strict=True):
        ids.append(read.reshape(read.numel()).long())
        own = grad.reshape(read.numel(), grad.shape[-1])
        rows.append(own if padding < 0 else own.masked_fill((ids[-1] == padding).unsqueeze(1), 0.0))
    found: Tensor = ADD_ROWS(dense, torch.cat(ids), torch.cat(rows))
    return found


def _erase(gm: GraphModule, node: Node) -> None:
    """Erase a sum that nothing reads any more, and what was made for it alone."""
    if node.users or node.target not in (ATEN.add.Tensor, ATEN._to_copy.default, *EMBEDDINGS):
        return
    sources = node.all_input_nodes
    gm.graph.erase_node(node)
    for source in sources:
        _erase(gm, source)
