"""Which operation ran in which precision and why: read from the marks that the plan left on the graph.

``12 x linear: low - a matrix product: ...``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from amp_graph.capture.captured_graphs import Captured
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.native.atomic_files import write_atomically
from amp_graph.passes.precision.plan_precision import Mark, marks

Row = tuple[str, int, str, str]


def counts(graphs: Sequence[Captured]) -> dict[str, int]:
    """Return how many operations compute in low and in full precision, and how many are as captured."""
    found = Counter(mark.precision for mark in _marks(graphs))
    return {precision: found[precision] for precision in ("low", "full", "captured")} if graphs else {}


def excerpt(graphs: Sequence[Captured], rows: int = 12) -> list[Row]:
    """Return the most frequent (operation, count, precision, reason); half of them of what stays full."""
    found = Counter((_named(m), m.precision, _reason(m)) for m in _marks(graphs) if m.precision != "captured")
    table = [(op, count, precision, reason) for (op, precision, reason), count in found.most_common()]
    full = [row for row in table if row[2] == "full"]
    low = [row for row in table if row[2] == "low"]
    chosen = full[: max(rows // 2, rows - len(low))]
    chosen += low[: rows - len(chosen)]
    return sorted(chosen, key=table.index)


def write_graphs(graphs: Sequence[Captured], path: Path) -> None:
    """Save the rewritten graphs as text, with the reason of each graph break if there is one."""
    parts = []
    for number, captured in enumerate(graphs):
        head = f"# graph {number} of {len(graphs)}"
        if captured.break_reason:
            head += f", ended by a graph break: {captured.break_reason} ({captured.break_line})"
        parts += [head, graph_text(captured.rewritten.gm), ""]
    write_atomically(path, "\n".join(parts))


def _marks(graphs: Sequence[Captured]) -> Iterator[Mark]:
    for captured in graphs:
        yield from marks(captured.rewritten.gm).values()


def _named(mark: Mark) -> str:
    return ", ".join(dict.fromkeys(op.removeprefix("aten.") for op in mark.ops)) or "(no operation)"


def _reason(mark: Mark) -> str:
    """Return the reason without the operations' names in front, which the table shows beside it."""
    return mark.reason.removeprefix(", ".join(mark.ops) + ": ")
