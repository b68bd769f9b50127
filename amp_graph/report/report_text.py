"""A report as text: graphs that differ in a flag alone together, equal layers folded into one line.

``low  a matrix product: most of a model's work``, and below it ``linear x12 in layers.*.fc``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from amp_graph.passes.graph.graph_text import grouped
from amp_graph.report.graph_facts import (
    PLACES,
    facts_of,
    short_place,
    shown_operation,
    size_text,
    split_reason,
)
from amp_graph.report.records import GraphReport, NodeReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

WIDTH = 110
REASONS = 25
ACCURACY = {
    "autocast": "mixed operands promote, as torch.autocast does",
    "fast": "low-precision residual streams: less memory, less exact than torch.autocast",
}


def report_text(report: Report, width: int | None = WIDTH, *, skipped: bool = False) -> str:
    """Return ``report`` as text, wrapped at ``width`` (None: never); ``skipped``: with what passes skipped, and why."""
    lines = [f"amp_graph report: {report.model}", *_head(report, width)]
    for graphs in _alike(report.graphs):
        lines += ["", *(graph.title for graph in graphs), *_facts(graphs, width, skipped), *_reasons(graphs, width)]
    return "\n".join(lines) + "\n"


def _head(report: Report, width: int | None) -> Iterator[str]:
    policy, summary = report.policy, report.summary()
    yield f"  policy     {policy}"
    yield f"  accuracy   {accuracy_text(policy.accuracy)}"
    yield f"  precision  {report.dtype}, compile={report.compile}"
    if summary["operations"]["all"]:
        shares = [(share["low"] / share["all"], name) for name in ("flops", "bytes") if (share := summary[name])["all"]]
        yield f"  low        {', '.join(f'{share:.0%} of {SHARES[name]}' for share, name in shares)}"
    held = ", ".join(f"{kind} {size_text(size)}" for kind, size in report.memory.items())
    yield f"  memory     {held or 'none'}; {size_text(sum(report.memory.values()))} in all"
    yield from (line for text in collective_lines(report) for line in wrapped(text, "  sharded    ", " " * 13, width))
    breaks = sum(bool(g.break_reason) for g in report.graphs)
    count = f"{_many(len(report.graphs), 'graph')}, {_many(breaks, 'graph break')}"
    yield f"  captured   {count}" if report.graphs else f"  {report.status}"
    if report.escaped:
        yield f"  escaped    code between the graphs runs {report.escaped}"
        yield from (f"    from {short_place(where)}: {reason}" for where, reason in report.breaks[:PLACES])
        yield from [f"    and {len(report.breaks) - PLACES} more places"] * (len(report.breaks) > PLACES)
    yield from (f"  not captured: {short_place(where)}: {reason}" for where, reason in report.skipped)
    yield from (f"  note: {note}" for note in report.notes)


def collective_lines(report: Report) -> Iterator[str]:
    """Yield a line for each unit of ``fully_shard``, equal ones as one: what it gathers and reduces, and why so."""
    units = grouped((one.unit, replace(one, unit="")) for one in report.collectives)
    for both, names in grouped((tuple(found), name) for name, found in units.items()).items():
        often = {1: "", 2: " twice"}
        sent = [f"{one.direction} {size_text(one.bytes)} in {one.dtype}{often.get(one.times, f' {one.times} times')}"
                for one in both]  # fmt: skip
        count = f" x{len(names)}" if len(names) > 1 else ""
        yield f"{folded_paths(names)}{count}: {', '.join(sent)}: {'; '.join(one.reason for one in both)}"


SHARES = {"flops": "the FLOPs of forward", "bytes": "the bytes that operations write"}


def accuracy_text(accuracy: str | float) -> str:
    """Return what a policy's accuracy means."""
    if isinstance(accuracy, str):
        return f"{accuracy}: {ACCURACY[accuracy]}"
    return (
        f"{accuracy:g}: the fastest plan whose predicted error is at most {accuracy:g} times that of accuracy=autocast"
    )


def _alike(graphs: Iterable[GraphReport]) -> list[list[GraphReport]]:
    """Return the graphs in groups: the same products of the same modules, in other modes or for other sizes."""

    def told_of(graph: GraphReport) -> tuple[object, ...]:
        operations = [node for node in graph.operations if node.cls == "allow"] or graph.operations
        same = frozenset((node.ops, node.module, node.precision) for node in operations)
        return same, graph.dtype, graph.break_line, graph.unplanned

    return list(grouped((told_of(graph), graph) for graph in graphs).values())


def _merged(graphs: Sequence[GraphReport], said: Iterable[Iterable[tuple[str, str]]]) -> dict[str, list[str]]:
    """Return what is said of each graph under its heading, once; with the numbers of the graphs, if not of all."""
    pairs = ((heading, (text, one.index)) for one, told in zip(graphs, said, strict=True) for heading, text in told)

    def shown(text: str, of: list[int]) -> str:
        numbers = f"graph{'s' * (len(of) > 1)} {', '.join(map(str, of))}: "
        return numbers + text if len(of) < len(graphs) else text

    return {heading: [shown(*one) for one in grouped(texts).items()] for heading, texts in grouped(pairs).items()}


# -- facts of a graph as a whole -----------------------------------------------------------------------


def _facts(graphs: Sequence[GraphReport], width: int | None, skipped: bool) -> Iterator[str]:
    said = _merged(graphs, (facts_of(graph, skipped=skipped).items() for graph in graphs))
    for label, texts in said.items():
        head = f"  {label:<13}" if label else "  "
        for line in "\n".join(texts).split("\n"):
            yield from wrapped(line, head, " " * len(head), width)
            head = " " * len(head)


# -- reasons -------------------------------------------------------------------------------------------


def _reasons(graphs: Sequence[GraphReport], width: int | None) -> Iterator[str]:
    """Yield each precision and reason, followed by its operations; what differs in figures alone is one reason."""
    found = _merged(graphs, ([(f"{precision:<9}{reason}", f"{ops}{f' {count}' if count else ''} in {modules}")
                              for ops, count, precision, modules, reason in fold(graph.operations)]
                             for graph in graphs))  # fmt: skip
    if found and any(graph.has_fp32 for graph in graphs):
        yield ""
        for reason, operations in list(found.items())[:REASONS]:
            yield from wrapped(reason, "  ", " " * 11, width)
            yield from wrapped("; ".join(operations), " " * 13, " " * 13, width or WIDTH)
        if len(found) > REASONS:
            yield f"  and {len(found) - REASONS} more reasons: report.html(path) has every node"


def fold(nodes: Sequence[NodeReport]) -> list[tuple[str, str, str, str, str]]:
    """Return one row for all nodes with the same operation, precision and reason."""
    groups = grouped(
        ((shown_operation(node), node.precision, split_reason(node.reason, node.ops)[0]), node.module) for node in nodes
    )
    return [
        (ops, f"x{len(modules)}" if len(modules) > 1 else "", precision, folded_paths(modules), reason)
        for (ops, precision, reason), modules in groups.items()
    ]


def folded_paths(paths: Iterable[str]) -> str:
    """``layers.0.fc``, ``layers.1.fc``, ``head`` -> ``layers.*.fc, head``."""
    exact = grouped((re.sub(r"\b\d+\b", "*", path), path) for path in paths)
    shown = (full[0] if len({*full}) == 1 else folded for folded, full in exact.items())
    return ", ".join(name or "(root)" for name in shown)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def wrapped(text: str, first: str, later: str, width: int | None) -> list[str]:
    """Return a line of text, wrapped at ``width``, with its indentations; no word is cut."""
    if width is None:
        return [first + text]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip
