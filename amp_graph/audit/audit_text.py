"""An audit for a terminal of 80 columns: a verdict, the findings by code, the table of precisions, and what was unseen.

``train.py:42: AMP101 warning: autocast('cuda', bfloat16) was entered 4 times, and ...``, and below it ``fix: ...``.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from amp_graph.audit.codes import CODES
from amp_graph.audit.precision_table import Row, folded
from amp_graph.audit.records import LEVELS
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.report.graph_facts import size_text
from amp_graph.report.report_html import seconds_text
from amp_graph.report.report_text import wrapped

if TYPE_CHECKING:
    from amp_graph.audit.audit_report import AuditReport

WIDTH = 80
MOST_PLACES, MOST_ALSO, MOST_ROWS = 12, 4, 40  # of a code, of a finding, of the table
SHORT = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
COLUMNS = ("module", "stored", "computes", "FLOPs", "saved", "grads", "state", "by")
LEAST = 8  # columns for the name of a module; a longer one has a line of its own
HEADING = (
    "Precisions: of parameters, of operations and their share of FLOPs, of what is",
    "saved for backward, gradients and optimizer state; and who lowered operations",
    "(x2: two operations of the looked-at steps; after a name, two equal layers)",
)


def audit_text(report: AuditReport, whole: str) -> str:
    """Return ``report`` as text; ``whole``: what has the rows of the table that are left out, "" for none."""
    parts = [
        wrapped(verdict(report), "", "  ", WIDTH),
        *_findings(report),
        _table(report, whole),
        ["Not seen:", *(line for text in unseen_lines(report) for line in wrapped(text, "  - ", "    ", WIDTH))],
        [line for one in report.plan for line in wrapped(one, "", "  ", WIDTH)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def verdict(report: AuditReport) -> str:
    """Return the first line: how many findings of each level, and in which steps operations were seen."""
    levels = Counter(f.level for f in report.findings)
    counts = [f"{levels[level]} {level}{'s' * (levels[level] > 1)}" for level in reversed(LEVELS) if levels[level]]
    silenced = f" ({report.silenced} silenced)" if report.silenced else ""
    if not report.looked_at:
        return f"amp_graph audit: {looked_text(report)}" + (f"; {', '.join(counts)}{silenced}" if counts else silenced)
    return f"amp_graph audit: {', '.join(counts) or 'no findings'}{silenced}; {looked_text(report)}"


def looked_text(report: AuditReport) -> str:
    """Return in which steps operations were seen."""
    if not report.looked_at:
        ended = f"{report.steps or 'no'} step{'s' * (report.steps > 1)} ended"
        asked = [ordinal(n) for n in report.looks] + [f"each {ordinal(report.every)}"] * (report.every > 0)
        named = " and ".join(filter(None, (", ".join(asked[:-1]), *asked[-1:])))
        return f"nothing was looked at: {ended}, and " + (f"the {named} were to be" if named else "none was to be")
    if not report.steps:
        return "looked at one call"
    steps = [n for n in report.looked_at if n <= report.steps]
    shown = ", ".join(map(str, steps if len(steps) < 5 else [*steps[:3], "...", steps[-1]]))
    looks = [f"step{'s' * (len(steps) > 1)} {shown} of {report.steps}"] if steps else []
    if len(steps) < len(report.looked_at):
        looks.append(f"what ran after step {report.steps}, the last that ended")
    if report.evaluated:
        looks.append(f"a model's call in evaluation after step {report.evaluated}")
    return f"looked at {', and at '.join(looks)}"


def ordinal(number: int) -> str:
    """Return ``2nd`` for 2."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


# -- findings ----------------------------------------------------------------------------------------------


def _findings(report: AuditReport) -> Iterator[list[str]]:
    for code, found in grouped((f.code, f) for f in report.findings).items():
        fixes = dict.fromkeys(f.fix for f in found)
        why = " ".join(CODES[code].why.split())
        lines = [*wrapped(f"{code}: {CODES[code].title}", "", "  ", WIDTH), *wrapped(why, "  ", "  ", WIDTH)]
        for one in found[:MOST_PLACES]:
            lines += [
                *wrapped(f"{one.place}: {code} {one.level}: {one.text}", "  ", "    ", WIDTH),
                *(wrapped(_few(one.also), "    also ", "         ", WIDTH) if one.also else ()),
                *(wrapped(one.fix, "    fix: ", "         ", WIDTH) if len(fixes) > 1 else ()),
            ]
        if len(found) > MOST_PLACES:
            lines.append(f"  and at {len(found) - MOST_PLACES} more places")
        yield lines + (wrapped(next(iter(fixes)), "  fix: ", "       ", WIDTH) if len(fixes) == 1 else [])


def _few(also: Sequence[str]) -> str:
    return ", ".join([*also[:MOST_ALSO], *([f"{len(also) - MOST_ALSO} more"] if len(also) > MOST_ALSO else [])])


# -- the table ---------------------------------------------------------------------------------------------


def _table(report: AuditReport, whole: str) -> list[str]:
    rows, numbers = table_cells(report)
    if not rows:
        return []
    cells: list[list[Sequence[str]]] = [[(name,) for name in COLUMNS], *rows[:MOST_ROWS]]
    widths = [max((len(line) for row in cells for line in row[i]), default=0) for i in range(len(COLUMNS))]
    widths[0] = min(widths[0], max(LEAST, WIDTH - 2 - sum(widths[1:]) - len(widths[1:])))
    lines = [*HEADING]
    for row in cells:
        (name, *_), *others = row
        if len(name) > widths[0]:
            lines.append(f"  {name}")
            name = ""
        for line in itertools.zip_longest((name,), *others, fillvalue=""):
            lines.append("  " + " ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    if len(rows) > MOST_ROWS:
        lines.append(f"  and {len(rows) - MOST_ROWS} more rows" + (f": {whole} has all" if whole else ""))
    for who, number in list(numbers.items())[:MOST_ROWS]:
        lines += wrapped(f"[{number}] {who}", "  ", "      ", WIDTH)
    return lines + list(beside(report))


def table_cells(report: AuditReport) -> tuple[list[list[Sequence[str]]], dict[str, int]]:
    """Return the cells of the rows that have any, and a number for each region and cast that lowered an operation.

    The rows of most FLOPs are the first, others are in the order of the models.
    """
    rows = sorted(folded(report.rows), key=lambda row: -row.flops.total())
    numbers = {who: i for i, who in enumerate(dict.fromkeys(who for row in rows for who in row.decided), start=1)}
    flops = sum(row.flops.total() for row in rows)
    cells = (_row_cells(row, flops, numbers) for row in rows)
    return [row for row in cells if any(row[1:])], numbers


def _row_cells(row: Row, flops: int, numbers: Mapping[str, int]) -> list[Sequence[str]]:
    """Return the cells of a row, each as its lines. ``flops``: of all rows."""
    computed = [dtype for dtype, _ in (row.forward + row.flops).most_common()]
    return [
        (row.module + (f" x{row.count}" if row.count > 1 else ""),),
        [*map(short, row.parameters)],
        [
            f"{short(dtype)} x{row.forward[dtype]}" if row.forward[dtype] else f"{short(dtype)} bwd"
            for dtype in computed
        ],
        [f"{row.flops[dtype] / flops:5.0%}" if row.flops[dtype] else "" for dtype in computed],
        [*map(short, row.saved)],
        [*map(short, row.gradients)],
        [*map(short, row.states), *(f"{short(dtype)} master" for dtype in row.masters)],
        textwrap.wrap(" ".join(str(numbers[who]) for who in row.decided), 8),
    ]


def short(dtype: str) -> str:
    """Return ``bf16`` for ``bfloat16``."""
    return SHORT.get(dtype, dtype)


def beside(report: AuditReport) -> Iterator[str]:
    """Yield lines on what is of no module: what travels between ranks, and what optimizers keep beside the models."""
    for name, totals in report.between_ranks.items():
        yield f"  between ranks: {name} x{totals.calls}, {size_text(totals.bytes)}"
    for dtype, size in report.outside_of_models.items():
        yield f"  updated by optimizers, but of no model (masters?): {short(dtype)}, {size_text(size)}"


# -- about itself ------------------------------------------------------------------------------------------


def unseen_lines(report: AuditReport) -> Iterator[str]:
    """Yield what was not seen, and what looking cost."""
    yield from report.unseen
    others = report.steps - sum(n <= report.steps for n in report.looked_at)
    if others > 0:
        yield (
            f"operations of {others} other step{'s' * (others > 1)}: what happens there alone is missed; --every N "
            "looks at more"
        )
    yield "operations inside of C++ extensions and compiled code, and other processes"
    looked, other = report.seconds["looked_at"], report.seconds["others"]
    if looked and other:
        times = f"({looked / other:.1f} times)"
        yield f"cost: {seconds_text(looked)} for a step that was looked at, {seconds_text(other)} for others {times}"
