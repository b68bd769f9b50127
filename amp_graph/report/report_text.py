"""A report as text: graphs that differ in a flag alone together, equal layers folded into one line.

``low  a matrix product: most of a model's work``, and below it ``linear x12 in layers.*.fc``.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from amp_graph.report.reasons import split_reason
from amp_graph.report.records import WEIGHT, GraphReport, NodeReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

WIDTH = 110
REASONS = 25
PLACES = 5  # graph breaks, and reasons of skips, that are listed
CELL = 60
INSTALLED = re.compile(r"^(?:(?!\.py:).)*?[/\\](?:site|dist)-packages[/\\]")  # the start of a path in a package
ACCURACY = {
    "autocast": "mixed operands promote, as torch.autocast does",
    "fast": "low-precision residual streams: less memory, less exact than torch.autocast",
}
Facts = dict[str, str]  # by label; a line break begins a line below


def report_text(report: Report, width: int | None = WIDTH, *, skipped: bool = False) -> str:
    """Return ``report`` as text, wrapped at ``width`` (None: never); ``skipped``: with what passes skipped, and why."""
    lines = [f"amp_graph report: {report.model}", *_head(report)]
    for graphs in _alike(report.graphs):
        lines += ["", *(graph.title for graph in graphs), *_facts(graphs, width, skipped), *_reasons(graphs, width)]
    return "\n".join(lines) + "\n"


def _head(report: Report) -> Iterator[str]:
    policy, summary = report.policy, report.summary()
    yield f"  policy     {policy}"
    yield f"  accuracy   {accuracy_text(policy.accuracy)}"
    yield f"  precision  {report.dtype}, compile={report.compile}"
    if summary["operations"]["all"]:
        shares = [(share["low"] / share["all"], name) for name in ("flops", "bytes") if (share := summary[name])["all"]]
        yield f"  low        {', '.join(f'{share:.0%} of {SHARES[name]}' for share, name in shares)}"
    held = ", ".join(f"{kind} {size_text(size)}" for kind, size in report.memory.items())
    yield f"  memory     {held or 'none'}; {size_text(sum(report.memory.values()))} in all"
    breaks = sum(bool(g.break_reason) for g in report.graphs)
    count = f"{_many(len(report.graphs), 'graph')}, {_many(breaks, 'graph break')}"
    yield f"  captured   {count}" if report.graphs else f"  {report.status}"
    if report.escaped:
        yield f"  escaped    code between the graphs runs {report.escaped}"
        yield from (f"    from {short_place(where)}: {reason}" for where, reason in report.breaks[:PLACES])
        yield from [f"    and {len(report.breaks) - PLACES} more places"] * (len(report.breaks) > PLACES)
    yield from (f"  not captured: {short_place(where)}: {reason}" for where, reason in report.skipped)
    yield from (f"  note: {note}" for note in report.notes)


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
    groups: dict[object, list[GraphReport]] = {}
    for graph in graphs:
        operations = [node for node in graph.operations if node.cls == "allow"] or graph.operations
        same = frozenset((node.ops, node.module, node.precision) for node in operations)
        groups.setdefault((same, graph.dtype, graph.break_line, graph.unplanned), []).append(graph)
    return list(groups.values())


def _merged(graphs: Sequence[GraphReport], said: Iterable[Iterable[tuple[str, str]]]) -> dict[str, list[str]]:
    """Return what is said of each graph under its heading, once; with the numbers of the graphs, if not of all."""
    found: dict[str, dict[str, list[int]]] = {}
    for graph, pairs in zip(graphs, said, strict=True):
        for heading, text in pairs:
            found.setdefault(heading, {}).setdefault(text, []).append(graph.index)

    def shown(text: str, of: list[int]) -> str:
        numbers = f"graph{'s' * (len(of) > 1)} {', '.join(map(str, of))}: "
        return numbers + text if len(of) < len(graphs) else text

    return {heading: [shown(*item) for item in texts.items()] for heading, texts in found.items()}


# -- facts of a graph as a whole -----------------------------------------------------------------------


def _facts(graphs: Sequence[GraphReport], width: int | None, skipped: bool) -> Iterator[str]:
    said = _merged(graphs, (facts_of(graph, skipped=skipped).items() for graph in graphs))
    for label, texts in said.items():
        head = f"  {label:<13}" if label else "  "
        for line in "\n".join(texts).split("\n"):
            yield from _wrapped(line, head, " " * len(head), width)
            head = " " * len(head)


def facts_of(graph: GraphReport, *, skipped: bool = True) -> Facts:
    """Return what is said of a graph as a whole: its break, failures, counts, budget; and what passes skipped."""
    where = f"at {short_place(graph.break_line)}: " if graph.break_line else ""
    ends = f"ends in a graph break {where}{graph.break_reason}" if graph.break_reason else ""
    if not graph.has_fp32:
        return {"": "\n".join(filter(None, (ends, f"{NOTHING[graph.has_floats]}: nothing to do")))}
    left_out = [f"pass {note.rule} is left out of this graph: {_first_line(note.reason)}" for note in graph.left_out]
    unplanned = f"this graph {_first_line(graph.unplanned)}" if graph.unplanned else ""
    found = {
        "": "\n".join(filter(None, (ends, unplanned, *left_out))),
        **dict(zip(("speed", "fix"), predicted_lines(graph), strict=False)),
        "operations": _counts(graph.operations),
        "budget": _budget(graph),
        "casts": _casts(graph),
        "activations": _activations(graph),
        "in no list": "\n".join(_unlisted(graph.operations)),
        "removed": "\n".join(f"{note.node}: {note.reason}" for note in graph.removed[:PLACES]) if skipped else "",
        "skipped": "\n".join(_skips(graph)) if skipped else "",
    }
    return {label: text for label, text in found.items() if text}


NOTHING = ("integer-only", "no fp32 operation")  # by whether there are floats


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _counts(nodes: Sequence[NodeReport]) -> str:
    """Count the operations by precision, and in each by class."""
    found: dict[str, Counter[str]] = {}
    for node in nodes:
        found.setdefault(node.precision, Counter())[node.cls] += 1
    shown = {p: ", ".join(f"{count} {cls}" for cls, count in found[p].most_common()) for p in sorted(found, key=ORDER)}
    return ", ".join(f"{found[p].total()} {p} ({classes})" for p, classes in shown.items()) or "none"


ORDER = ("low", "full", "captured").index


def _budget(graph: GraphReport) -> str:
    """Return what the plan makes of its error budget."""
    plan = graph.budget
    if plan is None:
        return ""
    origin = plan.origin if plan.origin == "measured" else f"{plan.origin}, no bound"
    left = f"; {plan.unmeasured} without gradients as in autocast" if plan.unmeasured and "," not in origin else ""
    kept = "" if plan.error <= plan.multiple else ": no plan is that exact; this is the most exact one"
    speed = f"{plan.of_autocast / plan.picoseconds:.3f}" if plan.of_autocast and plan.picoseconds else "1"
    return (
        f"error budget {plan.multiple:g}: predicted error {plan.error:.3f} ({origin}{left}){kept}\n"
        f"and predicted speed {speed}, as ratios to the plan of accuracy=autocast"
    )


def _casts(graph: GraphReport) -> str:
    weights, kept = sum(c.of == WEIGHT for c in graph.casts), sum(c.kept for c in graph.casts)
    once = f", {'all' if kept == weights else kept} kept" if kept else ""
    removed = f", {len(graph.removed)} removed" if graph.removed else ""
    ours = f"{len(graph.casts)} in the graph ({len(graph.casts) - weights} of activations, {weights} of weights{once})"
    found, theirs = graph.autocast, ""
    if found is not None:
        counts = f"{found.all} a call ({found.activations} of activations, {found.weights} of weights)"
        theirs = f"\ntorch.autocast: {f'not counted: {found.why_not}' if found.why_not else counts}"
    return ours + removed + theirs


def _activations(graph: GraphReport) -> str:
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in graph.bytes.items()) or "none"
    total, before = size_text(sum(graph.bytes.values())), size_text(graph.captured_bytes)
    spared = f"\nrecomputed, not saved: {size_text(graph.spared_bytes)}" if graph.spared_bytes else ""
    return f"{total} written, estimated ({parts}); as captured {before}{spared}"


def predicted_lines(graph: GraphReport, *, only_slow: bool = False) -> list[str]:
    """Return lines on the predicted speed; where low precision is slower, what was done, or can be done."""
    found = graph.predicted
    if found is None:
        return []
    speed = f"predicted speed {found.speed:.2g} times fp32's"
    if found.left_alone:
        return [
            f"left in full precision: low precision is not profitable on {found.machine}, {speed}",
            "a policy with a dtype and without skip_unprofitable=graphs lowers it all the same",
        ]
    if found.speed >= 1:
        return [] if only_slow else [f"{speed} on {found.machine}"]
    hint = found.why_low or "policy 'auto', or the policy word skip_unprofitable=graphs, leaves such graphs in fp32"
    return [f"low precision is not profitable on {found.machine}: {speed}", hint]


def _unlisted(nodes: Iterable[NodeReport]) -> Iterator[str]:
    unlisted = [n for n in nodes if not n.listed]
    if unlisted:
        yield "operations that no list names, run as captured:"
    for ops, count in Counter(n.ops for n in unlisted).items():
        first = next(n for n in unlisted if n.ops == ops)
        yield f"{_named(first)} x{count}, first at {short_place(first.line) or first.name}"


def _skips(graph: GraphReport) -> Iterator[str]:
    """Yield lines on the nodes that passes skipped, each reason once."""
    groups: dict[str, list[str]] = {}
    for note in graph.skips:
        groups.setdefault(f"{note.rule}: {note.reason}", []).append(note.node)
    for reason, nodes in groups.items():
        yield f"{nodes[0]}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}: {reason}"


# -- reasons -------------------------------------------------------------------------------------------


def _reasons(graphs: Sequence[GraphReport], width: int | None) -> Iterator[str]:
    """Yield each precision and reason, followed by its operations; what differs in figures alone is one reason."""
    found = _merged(graphs, ([(f"{precision:<9}{reason}", f"{ops}{f' {count}' if count else ''} in {modules}")
                              for ops, count, precision, modules, reason in fold(graph.operations)]
                             for graph in graphs))  # fmt: skip
    if found and any(graph.has_fp32 for graph in graphs):
        yield ""
        for reason, operations in list(found.items())[:REASONS]:
            yield from _wrapped(reason, "  ", " " * 11, width)
            yield from _wrapped("; ".join(operations), " " * 13, " " * 13, width or WIDTH)
        if len(found) > REASONS:
            yield f"  and {len(found) - REASONS} more reasons: report.html(path) has every node"


def fold(nodes: Sequence[NodeReport]) -> list[tuple[str, str, str, str, str]]:
    """Return one row for all nodes with the same operation, precision and reason."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        reason, _ = split_reason(node.reason, node.ops)
        groups.setdefault((_named(node), node.precision, reason), []).append(node.module)
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


def _named(node: NodeReport) -> str:
    """Return the operation of a node, or what it calls if that is several."""
    return node.ops[0].removeprefix("aten.") if len(node.ops) == 1 else node.call.removeprefix(".")


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


def _wrapped(text: str, first: str, later: str, width: int | None) -> list[str]:
    """Return a line of text, wrapped at ``width``, with its indentations; no word is cut."""
    if width is None:
        return [first + text]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip
