"""Which operation ran in which precision and why, from the report of a converted model.

``(linear, matmul; 14; low; "a matrix product: ...")``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from amp_graph.report import Report
from amp_graph.report.records import NodeReport

Row = tuple[str, int, str, str]


def counts(report: Report | None) -> dict[str, int]:
    """Return how many operations compute in low and in full precision; nothing of what is not converted."""
    if report is None:
        return {}
    found = Counter(node.precision for node in _operations(report))
    return {precision: found[precision] for precision in ("low", "full")}


def excerpt(report: Report, rows: int = 12) -> list[Row]:
    """Return the most frequent (operations, count, precision, reason), a row for each reason.

    Half of the rows are of what stays in full precision.
    """
    found: dict[tuple[str, str], Counter[str]] = {}
    for node in _operations(report):
        found.setdefault((node.precision, _reason(node)), Counter())[_named(node)] += 1
    table = [
        (", ".join(op for op, _ in ops.most_common()), ops.total(), precision, reason)
        for (precision, reason), ops in found.items()
    ]
    table.sort(key=lambda row: -row[1])
    full = [row for row in table if row[2] == "full"]
    low = [row for row in table if row[2] == "low"]
    chosen = full[: max(rows // 2, rows - len(low))]
    chosen += low[: rows - len(chosen)]
    return sorted(chosen, key=table.index)


def write_graphs(report: Report, path: Path) -> None:
    """Save the rewritten graphs as text."""
    path.write_text("\n\n".join(f"# graph {graph.index}\n{graph.text}" for graph in report.graphs))


def _operations(report: Report) -> Iterator[NodeReport]:
    for graph in report.graphs:
        yield from (node for node in graph.nodes if node.precision in ("low", "full") and node.cls != "cast")


def _named(node: NodeReport) -> str:
    return ", ".join(dict.fromkeys(op.removeprefix("aten.") for op in node.ops)) or "(no operation)"


def _reason(node: NodeReport) -> str:
    """Return the reason without what is of this node alone: its operations' names, and the gain over full precision."""
    parts = node.reason.removeprefix(", ".join(node.ops) + ": ").split("; ")
    return "; ".join(part for part in parts if " full, between " not in part)
