"""A report as text: one screen per graph, equal layers folded into one line.

``low  a matrix product: most of a model's work``, and below it ``linear x12 in layers.*.fc``.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from amp_graph.passes.precision.error_budget_planner import Budget
from amp_graph.report.reasons import split_reason
from amp_graph.report.records import WEIGHT, GraphReport, NodeReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

WIDTH = 110
REASONS = 25
CELL = 60
INSTALLED = re.compile(r"^(?:(?!\.py:).)*?[/\\](?:site|dist)-packages[/\\]")  # the start of a path in a package
ACCURACY = {
    "autocast": "mixed operands promote, as torch.autocast does",
    "fast": "low-precision residual streams: less memory, less exact than torch.autocast",
}


def report_text(report: Report, width: int | None = WIDTH) -> str:
    """Return ``report`` as text; lines of the table are cut at ``width`` (None: never)."""
    lines = [f"amp_graph report: {report.model}", *_head(report)]
    seen: dict[tuple[str, ...], int] = {}
    for graph in report.graphs:
        body = tuple(graph_lines(graph, width))
        first = seen.setdefault(body, graph.index)
        same = graph.index != first
        title = f"graph {graph.index}: {graph.mode}, {graph.dtype}"
        lines += ["", f"{title}: as graph {first}" if same else title, *predicted_lines(graph), *(() if same else body)]
    return "\n".join(lines) + "\n"


def _head(report: Report) -> list[str]:
    policy = report.policy
    lines = [
        f"  policy     {policy}",
        f"  accuracy   {accuracy_text(policy.accuracy)}",
        f"  precision  {report.dtype}, compile={report.compile}",
    ]
    held = ", ".join(f"{kind} {size_text(size)}" for kind, size in report.memory.items())
    lines.append(f"  memory     {held or 'none'}; {size_text(sum(report.memory.values()))} in all")
    breaks = sum(bool(g.break_reason) for g in report.graphs)
    count = f"{_many(len(report.graphs), 'graph')}, {_many(breaks, 'graph break')}"
    lines.append(f"  captured   {count}" if report.graphs else f"  {report.status}")
    lines += _escaped(report)
    lines += [f"  not captured: {short_place(where)}: {reason}" for where, reason in report.skipped]
    return lines + [f"  note: {note}" for note in report.notes]


def _escaped(report: Report) -> list[str]:
    """Return lines on how code between the graphs runs, and on the graph breaks."""
    if not report.escaped:
        return []
    places = [f"    from {short_place(where)}: {reason}" for where, reason in report.breaks]
    more = [f"    and {len(places) - 5} more places"] if len(places) > 5 else []
    return [f"  escaped    code between the graphs runs {report.escaped}", *places[:5], *more]


def accuracy_text(accuracy: str | float) -> str:
    """Return what a policy's accuracy means."""
    if isinstance(accuracy, str):
        return f"{accuracy}: {ACCURACY[accuracy]}"
    return (
        f"{accuracy:g}: the fastest plan whose predicted error is at most {accuracy:g} times that of accuracy=autocast"
    )


def graph_lines(graph: GraphReport, width: int | None = WIDTH) -> list[str]:
    """Return the indented lines of one graph, without its title."""
    lines = [*_break(graph)]
    if not graph.has_fp32:
        kind = "no fp32 operation" if graph.has_floats else "integer-only"
        return [*lines, f"  {kind}: nothing to do"]
    lines += [
        *_failures(graph),
        *_counts(graph.operations),
        *_budget(graph),
        *_casts(graph),
        _memory(graph),
        *_spared(graph),
        *_unlisted(graph.operations),
        *_skips(graph),
    ]
    lines.append("")
    groups = list(_by_reason(graph.operations, width))
    lines += [line for group in groups[:REASONS] for line in group]
    if len(groups) > REASONS:
        lines.append(f"  and {len(groups) - REASONS} more reasons: report.html(path) has every node")
    return [_cut(line, width) for line in lines]


def _break(graph: GraphReport) -> list[str]:
    if not graph.break_reason:
        return []
    where = f" at {short_place(graph.break_line)}" if graph.break_line else ""
    return [f"  ends in a graph break{where}", f"    {graph.break_reason}"]


def _failures(graph: GraphReport) -> list[str]:
    """Return lines on the passes that failed on the graph, and the consequences."""
    left_out = [f"  pass {note.rule} is left out of this graph: {_first_line(note.reason)}" for note in graph.left_out]
    return [*([f"  this graph {_first_line(graph.unplanned)}"] if graph.unplanned else []), *left_out]


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _counts(nodes: Sequence[NodeReport]) -> list[str]:
    """Count the operations by class and precision."""
    total = Counter(n.precision for n in nodes)
    lines = [f"  {_many(len(nodes), 'operation')}: {_tally(total)}"]
    for cls in dict.fromkeys(n.cls for n in nodes):
        lines.append(f"    {cls:<12}{_tally(Counter(n.precision for n in nodes if n.cls == cls))}")
    return lines


def _tally(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[p]} {p}" for p in ("low", "full", "captured") if counts[p]) or "none"


def _budget(graph: GraphReport) -> list[str]:
    """Return lines on the plan's error budget."""
    told = graph.budget
    if told is None:
        return []
    time = f"{told.picoseconds / told.of_autocast:.3f}" if told.of_autocast else "1"
    kept = "" if told.error <= told.multiple else ": no plan is that exact; this is the most exact one"
    return [
        f"  error budget {told.multiple:g}: predicted error {told.error:.3f} ({_origin(told)}){kept}",
        f"    and predicted time {time}, as ratios to the plan of accuracy=autocast",
    ]


def _origin(told: Budget) -> str:
    """Say what the predicted error is worth."""
    if told.origin != "measured":
        return f"{told.origin}, no bound"
    left = f"; {told.unmeasured} without gradients as in autocast" if told.unmeasured else ""
    return told.origin + left


def _casts(graph: GraphReport) -> list[str]:
    weights = sum(c.of == WEIGHT for c in graph.casts)
    kept = sum(c.kept for c in graph.casts)
    once = f", {'all' if kept == weights else kept} kept" if kept else ""
    inserted = f"{len(graph.casts) - weights} of activations, {weights} of weights{once}"
    lines = [
        f"  casts: {len(graph.casts)} in the graph ({inserted}), {len(graph.removed)} removed",
        *_of_autocast(graph),
    ]
    return lines + [f"    removed {note.node}: {note.reason}" for note in graph.removed[:3]]


def _of_autocast(graph: GraphReport) -> list[str]:
    """Return a line on the casts of ``torch.autocast`` in the same graph."""
    found = graph.autocast
    if found is None:
        return []
    if found.why_not:
        return [f"    those of torch.autocast were not counted: {found.why_not}"]
    return [f"    torch.autocast: {found.all} a call ({found.activations} of activations, {found.weights} of weights)"]


def _memory(graph: GraphReport) -> str:
    total = size_text(sum(graph.bytes.values()))
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in graph.bytes.items()) or "none"
    before = size_text(graph.captured_bytes)
    return f"  activations written, estimated: {total} ({parts}); as captured {before}"


def predicted_lines(graph: GraphReport) -> list[str]:
    """Return lines for a graph in which low precision is predicted to be slower: what was done, or can be done."""
    found = graph.predicted
    if found is None or (found.ratio <= 1 and not found.left_alone):
        return []
    time = f"predicted time {found.ratio:.2g} times full precision's"
    if found.left_alone:
        return [
            f"  left in full precision: low precision is not profitable on {found.machine}, {time}",
            "    a policy with a dtype and without skip_unprofitable=graphs lowers it all the same",
        ]
    hint = found.why_low or "policy 'auto', or the policy word skip_unprofitable=graphs, leaves such graphs in fp32"
    return [f"  low precision is not profitable on {found.machine}: {time}", f"    {hint}"]


def _spared(graph: GraphReport) -> list[str]:
    return [f"    recomputed, not saved: {size_text(graph.spared_bytes)}"] if graph.spared_bytes else []


def _unlisted(nodes: Iterable[NodeReport]) -> list[str]:
    unlisted = [n for n in nodes if not n.listed]
    if not unlisted:
        return []
    lines = ["  operations that no list names, run as captured:"]
    for ops, count in Counter(n.ops for n in unlisted).items():
        first = next(n for n in unlisted if n.ops == ops)
        lines.append(f"    {_names(ops)} x{count}, first at {short_place(first.line) or first.name}")
    return lines


def _skips(graph: GraphReport) -> list[str]:
    """Return lines on the nodes that passes skipped, each reason once."""
    groups: dict[str, list[str]] = {}
    for note in graph.skips:
        groups.setdefault(note.reason, []).append(note.node)
    lines = [f"  skipped: {nodes[0]}{_more(nodes)}: {reason}" for reason, nodes in groups.items()]
    return [*lines[:5], *([f"  and {len(lines) - 5} more reasons"] if len(lines) > 5 else [])]


def _more(nodes: Sequence[str]) -> str:
    return f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""


def _by_reason(nodes: Sequence[NodeReport], width: int | None) -> Iterator[list[str]]:
    """Yield each precision and reason, followed by its operations; what differs in figures alone is one reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for ops, count, precision, modules, reason in fold(nodes):
        groups.setdefault((precision, reason), []).append(f"{ops}{f' {count}' if count else ''} in {modules}")
    for (precision, reason), operations in groups.items():
        below = textwrap.wrap("; ".join(operations), (width or WIDTH) - 13, break_long_words=False)
        yield [f"  {precision:<9}{reason}", *(f"             {line}" for line in below)]


def fold(nodes: Sequence[NodeReport]) -> list[tuple[str, str, str, str, str]]:
    """Return one row for all nodes with the same operation, precision and reason."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        reason, _ = split_reason(node.reason, node.ops)
        groups.setdefault((_names(node.ops), node.precision, reason), []).append(node.module)
    return [
        (ops, f"x{len(modules)}" if len(modules) > 1 else "", precision, _modules(modules), reason)
        for (ops, precision, reason), modules in groups.items()
    ]


def _modules(paths: Iterable[str]) -> str:
    """``layers.0.fc``, ``layers.1.fc``, ``head`` -> ``layers.*.fc, head``; long paths lose their start."""
    exact: dict[str, set[str]] = {}
    for path in paths:
        exact.setdefault(re.sub(r"\b\d+\b", "*", path), set()).add(path)
    shown = [next(iter(full)) if len(full) == 1 else folded for folded, full in exact.items()]
    shown = [name or "(root)" for name in shown]
    short = ", ".join(shown)
    if len(short) > CELL:
        more = f", {len(shown) - 1} more" if len(shown) > 1 else ""
        room = CELL - len(more)
        short = (shown[0] if len(shown[0]) <= room else "..." + shown[0][3 - room :]) + more
    return short


def _names(ops: tuple[str, ...]) -> str:
    shown = [op.removeprefix("aten.") for op in ops]
    return shown[0] if len(shown) == 1 else f"{shown[0]}, {len(shown) - 1} more"


def size_text(size: int) -> str:
    """``4.1 MiB`` for a number of bytes."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def short_place(place: str) -> str:
    """Return a place with its file relative to the folder of installed packages, or else to the current directory."""
    here = os.getcwd().rstrip(os.sep) + os.sep
    return INSTALLED.sub("", place).removeprefix(here)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 3].rstrip() + "..."
