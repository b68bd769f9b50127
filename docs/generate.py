"""Write what the pages say of passes, policies and findings from their tables and the fields of ``Policy``.

python docs/generate.py            # writes policy.md; internals/passes.md, how-it-works.md, audit-codes.md
python docs/generate.py --check    # only says whether they are what the table gives
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amp_graph.audit.codes import CODES
from amp_graph.passes.pipeline_row import Phase, Row
from amp_graph.passes.pipeline_table import GROUPS
from amp_graph.policy import Policy
from amp_graph.step.step_table import EVERY

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"  # where benchmarks/ablation.py has a table a processor
COLUMNS = ("pass", "stage", "runs over", "devices", "on where", "exactness", "worth", "law")
LEAST = 0.01  # smaller gains are noise
# A line of the diagram: what is run over, and how that graph came about.
DIAGRAM = {
    Phase.CAPTURED: "every graph, when it has been captured",
    Phase.CALLS: "then, where it runs eagerly in calls",
    Phase.COMPILED: "then, where Inductor compiles it for a CPU",
    Phase.HANDOVER: "then, before any compiler gets it",
    Phase.INDUCTOR: "inside Inductor, the flat graphs of forward and backward",
    Phase.STEP: "the joint graph of forward and backward of a training step that runs eagerly",
    Phase.JOINT: "then, the joint graph of any training step, which these passes complete",
}


def table() -> str:
    """Return the table of passes in Markdown, in order."""
    found = worth()
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(row, row.worth or found.get(row.name, "")) for row in EVERY)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def worth() -> dict[str, str]:
    """Return what each pass that was measured gains at best: of time, or else of memory."""
    measured: dict[str, list[Any]] = {}
    for path in sorted(RESULTS.rglob("ablation.json")):
        for row in json.loads(path.read_text())["rows"]:
            measured.setdefault(row["name"], []).append(row)
    return {name: _best(rows) for name, rows in measured.items()}


def _best(rows: list[Any]) -> str:
    """Return the largest gain of ``rows``, which have ratios without the pass over with it, and where it is."""
    times = [(row["time"], "time", row) for row in rows if row["low"] > 1]
    memory = [(row[key] or 0, f"{key} memory", row) for row in rows for key in ("peak", "saved")]
    for kind in (times, memory):
        ratio, what, row = max(kind, key=lambda one: one[0], default=(0, "", {}))
        if ratio - 1 >= LEAST:
            return f"{what} without it {ratio:.2f} ({row['model']}, {row['way']})"
    return "no gain measured"


def _cells(row: Row, gain: str) -> tuple[str, ...]:
    name = f"`{row.name}`" + ("" if row.skippable else " (not optional)")
    phases = ", ".join(phase.value for phase in row.phases)
    needs = ", ".join([*(need.word for need in row.needs), *(f"with `{name}`" for name in row.joins)])
    law = row.law.replace("``", "`").replace("|", "\\|")
    return name, row.stage.value, phases, ", ".join(row.devices), needs or "always", row.grade, gain, law


def groups() -> str:
    """Return the groups of ``skip=``, a line a group."""
    return "\n".join(f"- `{word}`: {', '.join(f'`{name}`' for name in names)}" for word, names in GROUPS.items())


def words() -> str:
    """Return the words of a policy, from the fields that declare them."""
    rows = ["| word | values | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(Policy):
        name = field.name if field.name in ("dtype", "level") else f"`{field.name}=`"
        doc = field.metadata["doc"].replace("|", "\\|")
        rows.append(f"| {name} | {field.metadata['takes']} | {doc} |")
    return "\n".join(rows)


def codes() -> str:
    """Return a section for each finding of ``amp-graph audit``."""
    return "\n\n".join(
        f"## {code.name}\n\n**{code.title[0].upper()}{code.title[1:]}** ({code.level})\n\n{code.why.strip()}\n\n"
        f"With the fault:\n\n```python\n{code.bad.strip()}\n```\n\nWithout it:\n\n```python\n{code.good.strip()}\n```"
        for code in CODES.values()
    )


def diagram() -> str:
    """Return the passes by the graph that they run over, as a block of text."""
    lines = []
    for phase, title in DIAGRAM.items():
        names = "\0> ".join(row.name for row in EVERY if phase in row.phases)  # no line begins with >
        shown = textwrap.fill(names, 104, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        lines += [f"{title}:", shown.replace("\0", " ")]
    return "\n".join(["```", "your module > capture > FX graph", *lines, "```"])


REGIONS: dict[tuple[str, str], Callable[[], str]] = {
    ("internals/passes.md", "table"): table,
    ("internals/passes.md", "groups"): groups,
    ("internals/how-it-works.md", "diagram"): diagram,
    ("internals/audit-codes.md", "codes"): codes,
    ("policy.md", "words"): words,
}


def written(page: str, text: str) -> str:
    """Return ``text`` with what is between the markers of ``page`` written anew."""
    for (of_page, name), make in REGIONS.items():
        if of_page == page:
            begin, end = f"<!-- {name}: python docs/generate.py -->", f"<!-- end of {name} -->"
            region = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
            text, found = region.subn(lambda _: f"{begin}\n{make()}\n{end}", text)  # noqa: B023 called at once
            if found != 1:
                raise SystemExit(f"docs/{page}: {found} regions {name!r}\n  fix:   one line {begin}, and one {end}")
    return text


def main(words: list[str]) -> int:
    """Write the pages, or with ``--check`` name those that are out of date."""
    stale = []
    for page in dict.fromkeys(page for page, _ in REGIONS):
        path = DOCS / page
        before = path.read_text()
        after = written(page, before)
        if before != after:
            stale.append(page)
            if "--check" not in words:
                path.write_text(after)
    if stale:
        print(f"{'out of date' if '--check' in words else 'written'}: {', '.join(stale)}")
    return int(bool(stale) and "--check" in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
