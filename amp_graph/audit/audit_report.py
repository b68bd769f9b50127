"""The result of an audit: a plain value, and its views as text, page and data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amp_graph.audit.codes import CODES
from amp_graph.audit.plan import plan_lines
from amp_graph.audit.precision_table import Row, rows_of
from amp_graph.audit.records import LEVELS, Finding, Region, Training


@dataclass(frozen=True)
class AuditReport:
    """What an audit saw: ``findings``, the worst first, and the table of precisions, ``rows``.

    ``steps``: how many ended; ``looked_at``: those whose operations were seen. ``unseen``: what was not, and why.
    ``seconds``: of looked-at steps and of others, each a median.
    """

    findings: Sequence[Finding]
    rows: Sequence[Row]
    regions: Sequence[Region]
    steps: int
    looked_at: Sequence[int]
    unseen: Sequence[str]
    seconds: Mapping[str, float]
    plan: Sequence[str] = ()

    @classmethod
    def of(cls, training: Training, findings: Sequence[Finding], seconds: Mapping[int, float]) -> AuditReport:
        """Return the report of a training so far."""
        ordered = sorted(findings, key=lambda f: (-LEVELS.index(f.level), f.code, f.place))
        looked = [seconds[n] for n in training.looked_at if n in seconds]
        others = [s for n, s in seconds.items() if n > 1 and n not in training.looked_at]
        return cls(
            ordered, rows_of(training), list(training.regions), training.steps, list(training.looked_at),
            list(training.unseen), {"looked_at": _median(looked), "others": _median(others)},
            plan=plan_lines(training),
        )  # fmt: skip

    @property
    def worst(self) -> str:
        """The level of the worst finding; "" without one."""
        return max((f.level for f in self.findings), key=LEVELS.index, default="")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "findings": [
                {**asdict(f), "place": None, "file": f.place.file, "line": f.place.line, "title": CODES[f.code].title}
                for f in self.findings
            ],
            "modules": [asdict(row) for row in self.rows],
            "regions": [asdict(region) for region in self.regions],
            "steps": self.steps,
            "looked_at": list(self.looked_at),
            "unseen": list(self.unseen),
            "seconds": dict(self.seconds),
        }

    def text(self) -> str:
        """Return the report for a terminal."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"amp_graph audit: {self.steps} steps, looked at {', '.join(map(str, self.looked_at)) or 'none'}"
        for f in self.findings:
            yield f"{f.place}: {f.code} {f.level}: {CODES[f.code].title}"
            yield f"    {f.text}"
            yield f"    fix: {f.fix}"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
