"""The result of an audit: a plain value, and its views as text, page and data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from amp_graph.audit.audit_text import COLUMNS, audit_text, beside, table_cells, unseen_lines, verdict
from amp_graph.audit.codes import CODES
from amp_graph.audit.precision_table import Row, between_ranks, rows_of
from amp_graph.audit.records import LEVELS, Finding, Region, Totals, Training
from amp_graph.audit.speed.plan import PlanLines
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.report.report_html import asset, page_place, template

OF_REGION = ("device", "dtype", "enabled", "outer", "entered", "looked_at", "asked")
SCHEMA = 1  # a number that changes with the keys of ``to_dict``


@dataclass(frozen=True)
class AuditReport:
    """What an audit saw: ``findings``, the worst first, and the table of precisions, ``rows``.

    ``regions``: each use of ``torch.autocast``. ``steps``: how many ended; ``looked_at``: those whose operations were
    seen; ``evaluated``: the one behind which a model's call in evaluation was, or 0. ``silenced``: how many findings
    comments and configuration hide. ``between_ranks``: collectives by name and dtype; ``outside_of_models``: bytes by
    dtype of what optimizers update beside the models. ``unseen``: what was not seen, and why. ``seconds``: of looked-at
    steps and of others, each a median. ``plan``: what amp_graph would do, in lines. ``looks``, ``every``: which steps
    were to be looked at, as ``Audit`` takes them.
    """

    findings: Sequence[Finding]
    rows: Sequence[Row]
    regions: Sequence[Region]
    steps: int
    looked_at: Sequence[int]
    silenced: int
    between_ranks: Mapping[str, Totals]
    outside_of_models: Mapping[str, int]
    unseen: Sequence[str]
    seconds: Mapping[str, float]
    plan: Sequence[str] = ()
    looks: Sequence[int] = ()
    evaluated: int = 0
    every: int = 0

    @staticmethod
    def of(training: Training, findings: Sequence[Finding], seconds: Mapping[int, float], **others: Any) -> AuditReport:
        """Return the report of ``training`` so far, with these ``findings``; ``seconds``: of each step, by its number.

        ``others``: fields that ``training`` does not know.
        """
        ordered = sorted(findings, key=lambda f: (-LEVELS.index(f.level), f.code, f.place))
        looked = [seconds[n] for n in training.looked_at if n in seconds] or [0.0]
        unlike = [s for n, s in seconds.items() if n > 1 and n not in training.looked_at] or [0.0]
        return AuditReport(
            ordered, rows_of(training), list(training.regions), training.steps, list(training.looked_at),
            between_ranks=between_ranks(training), outside_of_models=Counter(training.outside),
            unseen=list(training.unseen), seconds={"looked_at": median(looked), "others": median(unlike)},
            plan=PlanLines(training), evaluated=training.evaluated, **others,
        )  # fmt: skip

    @property
    def worst(self) -> str:
        """The level of the worst finding; "" without one."""
        return max((f.level for f in self.findings), key=LEVELS.index, default="")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; docs/audit.md has a table of its keys."""
        return {
            "schema": SCHEMA,
            "findings": [
                {
                    "code": f.code, "level": f.level, "file": f.place.file, "line": f.place.line,
                    "title": CODES[f.code].title, "text": f.text, "why": " ".join(CODES[f.code].why.split()),
                    "fix": f.fix, "evidence": dict(f.evidence), "also": list(f.also),
                }
                for f in self.findings
            ],
            "modules": [row.to_dict() for row in self.rows],
            "regions": [
                {"file": one.place.file, "line": one.place.line, **{name: getattr(one, name) for name in OF_REGION}}
                for one in self.regions
            ],
            "between_ranks": {name: asdict(totals) for name, totals in self.between_ranks.items()},
            "outside_of_models": dict(self.outside_of_models),
            "steps": self.steps,
            "looked_at": list(self.looked_at),
            "evaluated": self.evaluated,
            "silenced": self.silenced,
            "unseen": list(unseen_lines(self)),
            "seconds": dict(self.seconds),
            "plan": list(self.plan),
        }  # fmt: skip

    def text(self, *, whole: str = "audit.report().html(path)") -> str:
        """Return the report for a terminal of 80 columns; ``whole``: what has rows that are left out, "" if none."""
        return audit_text(self, whole)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to ``path``, a page that fetches nothing and explains each code that it names.

        AmpGraphError if that is impossible.
        """
        rows, numbers = table_cells(self)
        page = template("audit.html").render(
            report=self,
            verdict=verdict(self),
            groups=list(grouped((f.code, f) for f in self.findings).items()),
            codes=CODES,
            columns=COLUMNS,
            rows=rows,
            numbers=[(number, page_place(who)) for who, number in numbers.items()],
            beside=list(beside(self)),
            unseen=list(unseen_lines(self)),
            styles=asset("page.css"),
        )
        write_or_refuse(path, page, "audit: report.html(path)", 'report.html("audit.html")')
