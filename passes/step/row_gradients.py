"""Keep the gradient of a table as the rows that were read, and what is added to it where the table is also a head.

Before: ``add(low.float(), embedding_dense_backward(grad, ids, ...))``, a table of zeros, one in fp32, and their sum.
After: ``add_rows(low, ids, grad, rows)``, which an update by element does not call: it reads the parts (``by_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.loss_scaling.joint_graph import gradient_nodes, set_gradients
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.torch_compat.fake import is_contiguous

ATEN: Any = torch.ops.aten
EMBEDDING = ATEN.embedding_dense_backward.default
# Rows of a table for each that is read. A step of a tied GPT takes 0.85 of the time with 8, 0.69 with 64; one of an
# LSTM, whose table is no head, 0.89 with 8, 1.02 with 4.
ROWS_PER_READ = 8


@dataclass(frozen=True)
class RowGradients(Pass):
    """Replaces the gradient of a table by ``add_rows``, if few rows are read, and at most one other gradient is added.

    Law: fp32 gradients of embeddings on the CPU, which are added to the other in fp32. Exactness: rounding-equal.
    """

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every gradient."""
        found, lives = gradient_nodes(gm), Lifetimes.of(gm)
        for i, total in enumerate(found):
            parts = list(_parts(total))
            reads = [n for n in parts if n.target is EMBEDDING and not any(n.args[4:])]
            others = [_narrowest(n) for n in parts if n not in reads]
            if len(others) > 1 or not _fits(total, reads, others) or not _stay(gm, reads, others, lives):
                continue
            given, paddings = [(n.args[0], n.args[1]) for n in reads], [n.args[3] for n in reads]
            found[i] = append(gm, _joined, others, given, paddings, len(value(total)))
            set_gradients(gm, found)
            _erase(gm, total)
            yield Change(self.name, "rows", found[i].name, f"{len(reads)} embeddings of one table")


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


def _fits(total: Node, reads: Sequence[Any], others: Sequence[Node]) -> bool:
    """Say whether all is on the CPU in fp32 or, of ``others``, lower, and few rows are read."""
    table, count = value(total), sum(value(n.args[1]).numel() for n in reads)
    full = [value(n) for read in reads for n in (read, read.args[0], total)]
    return (
        all(type(n) is int for n in (count, *table.shape))
        and 0 < count * ROWS_PER_READ <= len(table)
        and table.device.type == "cpu"
        and is_contiguous(table)
        and all(t.dtype == torch.float32 for t in full)
        and all(value(n).dtype in (*HALVES, torch.float32) for n in others)
    )


def _stay(gm: GraphModule, reads: Sequence[Any], others: Sequence[Node], lives: Lifetimes) -> bool:
    """Say whether what is read now can be read at the end: the graph made it, and does not write to it."""
    made = [*others, *(n.args[0] for n in reads)]
    kept = all(root.op == "call_function" for n in made for root in lives.roots[n])
    end = gm.graph.output_node()
    return kept and not any(lives.is_written_between(n, n, end) for n in (*made, *(n.args[1] for n in reads)))


def _joined(
    others: Sequence[Tensor], reads: Sequence[tuple[Tensor, Tensor]], paddings: Sequence[int], count: int
) -> Any:
    rows, ids = [], []
    for (grad, read), padding in zip(reads, paddings, strict=True):
        ids.append(read.reshape(read.numel()).long())
        own = grad.reshape(read.numel(), grad.shape[-1])
        rows.append(own if padding < 0 else own.masked_fill((ids[-1] == padding).unsqueeze(1), 0.0))
    dense = others[0] if others else rows[0].new_zeros(())  # one number for all
    return ADD_ROWS(dense, torch.cat(ids), torch.cat(rows), count)


def _erase(gm: GraphModule, node: Node) -> None:
    """Erase a sum that nothing reads any more, and what was made for it alone."""
    if node.users or node.target not in (ATEN.add.Tensor, ATEN._to_copy.default, EMBEDDING):
        return
    sources = node.all_input_nodes
    gm.graph.erase_node(node)
    for source in sources:
        _erase(gm, source)


# Takes parameters, gradients, state by kind, the learning rate, and found_inf or None.
Apply = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], Tensor, Tensor | None], None]


def add_rows(dense: Tensor, ids: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return ``dense``, ``count`` rows or one number for all, in fp32, with ``rows`` added to those of ``ids``."""
    return rows.new_empty(count, rows.shape[1]).copy_(dense).index_add_(0, ids, rows)


define_as_typed(add_rows, lambda rows, count: rows.new_empty(count, rows.shape[1]))
ADD_ROWS = OPS.add_rows.default


def by_rows(apply: Apply, tables: Sequence[int]) -> Callable[..., None]:
    """Return ``apply``, which updates by element, for gradients to which rows are still to be added.

    What it returns takes their ids and the rows last, a pair for each of the parameters numbered ``tables``. Copies of
    the rows of parameter and state are updated by their whole gradients, and written back behind the update of all.
    """

    def update(
        parameters: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        rate: Tensor,
        found_inf: Tensor | None,
        added: list[tuple[Tensor, Tensor]],
    ) -> None:
        kinds = [[*grads], [*parameters], *([*kind] for kind in states)]
        copied = []
        for n, (ids, rows) in zip(tables, added, strict=True):
            kinds[0][n] = laid_out_as(parameters[n], grads[n]) if grads[n].dim() else grads[n]
            whole = [kind[n] for kind in kinds]
            copies = [t.index_select(0, ids) if t.dim() else t.clone() for t in whole]
            copies[0] = copies[0] + _sums_of_equal(ids, rows, len(parameters[n]))
            for kind, one in zip(kinds, copies, strict=True):
                kind.append(one)
            copied.append((ids, whole[1:], copies[1:]))
        apply(kinds[1], kinds[0], kinds[2:], rate, found_inf)
        for ids, whole, copies in copied:
            for one, new in zip(whole, copies, strict=True):
                if one.dim():
                    one.index_copy_(0, ids, new)

    return update


def _sums_of_equal(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return for each of ``rows`` the sum of those with the same of ``ids``, below ``count``, in their order."""
    place = ids.new_empty(count)
    place[ids] = torch.arange(len(ids), device=ids.device)
    one = place[ids]  # of equal ids one place, whichever was written last
    return torch.zeros_like(rows).index_add_(0, one, rows)[one]
