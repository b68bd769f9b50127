"""A report as one HTML page: it fetches nothing, escapes everything, and filters its table as you type.

``html_page(report)`` returns the text that ``report.html(path)`` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from amp_graph.report.records import GraphReport, NodeReport
from amp_graph.report.report_text import graph_lines, predicted_lines, report_text

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

COLUMNS = ("node", "operation", "module", "class", "precision", "value", "reason", "list", "line")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --line: #8884; --low: #1a7f37; --full: #b35900; --cast: #8250df; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; }
pre { font: 12px/1.45 ui-monospace, monospace; overflow-x: auto; border: 1px solid var(--line);
  padding: .7rem; }
table { border-collapse: collapse; width: 100%; font-size: 12px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: Canvas; }
td:nth-child(-n+6), td:nth-child(n+8) { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
tr.low td:nth-child(5) { color: var(--low); } tr.full td:nth-child(5) { color: var(--full); }
tr.cast td:nth-child(4) { color: var(--cast); }
.filters { display: flex; gap: .6rem; margin: .6rem 0; flex-wrap: wrap; }
input, select { font: inherit; padding: .25rem .4rem; } input { min-width: 20rem; }
summary { cursor: pointer; margin: .6rem 0; }
"""
SCRIPT = """
for (const part of document.querySelectorAll("section")) {
  const word = part.querySelector("input"), choice = part.querySelector("select");
  const rows = [...part.querySelectorAll("tbody tr")], shown = part.querySelector("output");
  const filter = () => {
    const words = word.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = !choice.value || row.classList.contains(choice.value);
      row.hidden = !(fits && words.every(w => text.includes(w)));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${rows.length} nodes`;
  };
  word.addEventListener("input", filter); choice.addEventListener("change", filter); filter();
}
"""


def html_page(report: Report) -> str:
    """Return ``report`` as a whole page."""
    title = escape(f"amp_graph report: {report.model}")
    head = report_text(report).partition("\ngraph 0:")[0].partition("\n")[2].rstrip()
    body = "\n".join(_section(graph) for graph in report.graphs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<pre>{escape(head)}</pre>\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(graph: GraphReport) -> str:
    title = escape(f"Graph {graph.index}: {graph.mode}, {graph.dtype}")
    lines = [*predicted_lines(graph), *graph_lines(graph, None)]
    summary = escape("\n".join(line.removeprefix("  ") for line in lines))
    return (
        f"<section>\n<h2>{title}</h2>\n<pre>{summary}</pre>\n{_filters()}\n"
        f"{_table(graph.nodes)}\n{_folded('The graph as rewritten', graph.text)}\n"
        f"{_folded('The graph as captured', graph.before)}\n</section>"
    )


def _filters() -> str:
    kinds = "".join(f"<option>{kind}</option>" for kind in ("low", "full", "captured", "cast", "unlisted"))
    return (
        '<div class="filters"><input type="search" placeholder="filter: words of any column" '
        f'aria-label="filter"><select aria-label="kind"><option value="">all</option>{kinds}</select>'
        "<output></output></div>"
    )


def _table(nodes: Iterable[NodeReport]) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "\n".join(_row(node) for node in nodes)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _row(node: NodeReport) -> str:
    kinds = f"{node.precision}{' cast' * (node.cls == 'cast')}{' unlisted' * (not node.listed)}"
    what = (f"{node.number} {node.name}", ", ".join(node.ops), node.module)
    why = (node.cls, node.precision, node.type, node.reason, node.origin, node.line)
    return f'<tr class="{escape(kinds)}">{_cells((*what, *why))}</tr>'


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
