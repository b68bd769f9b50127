"""An audit as one HTML page: it fetches nothing, has no script, and explains each code that it names.

``audit_page(report)`` returns the text that ``report.html(path)`` writes, in the style of the report of a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amp_graph.audit.audit_text import COLUMNS, beside, table_cells, unseen_lines, verdict
from amp_graph.audit.codes import CODES
from amp_graph.report.graph_facts import grouped
from amp_graph.report.report_html import asset, page_place, template

if TYPE_CHECKING:
    from amp_graph.audit.audit_report import AuditReport

TEMPLATES = Path(__file__).parent / "templates"


def audit_page(report: AuditReport) -> str:
    """Return ``report`` as a whole page."""
    rows, numbers = table_cells(report)
    return str(
        template("audit.html", TEMPLATES).render(
            report=report,
            verdict=verdict(report),
            groups=list(grouped((f.code, f) for f in report.findings).items()),
            codes=CODES,
            columns=COLUMNS,
            rows=rows,
            numbers=[(number, page_place(who)) for who, number in numbers.items()],
            beside=list(beside(report)),
            unseen=list(unseen_lines(report)),
            styles=asset("page.css"),
        )
    )
