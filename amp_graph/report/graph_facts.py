"""What a report says of a graph as a whole: its break, failures, counts, casts, speed, and what passes skipped.

Before: a ``GraphReport``. After: ``{"operations": "25 low (9 allow, ...), 8 captured (8 neutral)", "casts": ...}``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from amp_graph.lists.errors import first_line
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.report.records import WEIGHT, GraphReport, NodeReport

PLACES = 5  # graph breaks, and reasons of skips, that are listed
INSTALLED = re.compile(r"^(?:(?!\.py:).)*?[/\\](?:site|dist)-packages[/\\]")  # the start of a path in a package
Facts = dict[str, str]  # by label; a line break begins a line below


def facts_of(graph: GraphReport, *, skipped: bool = True) -> Facts:
    """Return what is said of a graph as a whole: its break, failures, counts, budget; and what passes skipped."""
    where = f"at {short_place(graph.break_line)}: " if graph.break_line else ""
    ends = f"ends in a graph break {where}{graph.break_reason}" if graph.break_reason else ""
    if not graph.has_fp32:
        return {"": "\n".join(filter(None, (ends, f"{NOTHING[graph.has_floats]}: nothing to do")))}
    left_out = [f"pass {note.rule} is left out of this graph: {first_line(note.reason)}" for note in graph.left_out]
    unplanned = f"this graph {first_line(graph.unplanned)}" if graph.unplanned else ""
    skips = grouped((f"{note.rule}: {note.reason}", note.node) for note in graph.skips if skipped)
    found = {
        "": "\n".join(filter(None, (ends, unplanned, *left_out))),
        **dict(zip(("speed", "fix"), predicted_lines(graph), strict=False)),
        "operations": _counts(graph.operations),
        "budget": _budget(graph),
        "casts": _casts(graph),
        "activations": _activations(graph),
        "in no list": "\n".join(_unlisted(graph.operations)),
        "removed": "\n".join(f"{note.node}: {note.reason}" for note in graph.removed[:PLACES]) if skipped else "",
        "skipped": "\n".join(
            f"{nodes[0]}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}: {reason}"
            for reason, nodes in skips.items()
        ),
    }
    return {label: text for label, text in found.items() if text}


NOTHING = ("integer-only", "no fp32 operation")  # by whether there are floats


def _counts(nodes: Sequence[NodeReport]) -> str:
    """Count the operations by precision, and in each by class."""
    classes_of = grouped((node.precision, node.cls) for node in nodes)
    found = {precision: Counter(classes) for precision, classes in classes_of.items()}
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
        f"error budget {plan.multiple:g}: predicted error of the outputs {plan.error:.3f} ({origin}{left}){kept}\n"
        f"(of gradients: not predicted) and predicted speed {speed}, as ratios to the plan of accuracy=autocast"
    )


def _casts(graph: GraphReport) -> str:
    weights, kept = sum(c.of == WEIGHT for c in graph.casts), sum(c.kept for c in graph.casts)
    once = f", {'all' if kept == weights else kept} kept" if kept else ""
    removed = f", {len(graph.removed)} removed" if graph.removed else ""
    activations = len(graph.casts) - weights
    return f"{len(graph.casts)} in the graph ({activations} of activations, {weights} of weights{once}){removed}"


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
    return [
        f"low precision is not profitable on {found.machine}: {speed}",
        found.why_low or "policy 'auto', or the policy word skip_unprofitable=graphs, leaves such graphs in fp32",
    ]


def _unlisted(nodes: Iterable[NodeReport]) -> Iterator[str]:
    unlisted = [n for n in nodes if not n.listed]
    if unlisted:
        yield "operations that no list names, run as captured:"
    for first, *others in grouped((n.ops, n) for n in unlisted).values():
        yield f"{shown_operation(first)} x{1 + len(others)}, first at {short_place(first.line) or first.name}"


def shown_operation(node: NodeReport) -> str:
    """Return the operation of a node, or what it calls if that is several."""
    return (node.ops[0] if len(node.ops) == 1 else node.call).removeprefix("aten.").removeprefix(".")


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
    return INSTALLED.sub("", place).removeprefix(os.getcwd().rstrip(os.sep) + os.sep)


# -- the words and the figures of a reason ------------------------------------------------------------


READER = re.compile(r"(\S+) \((.+)\) (takes \w+ precision)")


def split_reason(reason: str, ops: Sequence[str]) -> tuple[str, str]:
    """Return a reason's words, without the names of the operations ``ops``, and what is of one operation, or "".

    A cast's reason names the node that reads it, ``linear_3 (aten.linear) takes low precision``.
    """
    read = READER.fullmatch(reason)
    words = reason.removeprefix(", ".join(ops) + ": ")
    return (words, "") if read is None else (f"{read[2]} {read[3]}", f"for {read[1]}")
