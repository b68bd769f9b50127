"""A report as one HTML page: it fetches nothing, and escapes everything.

``html_page(report)`` returns the text that ``report.html(path)`` writes: Jinja's templates of ``templates``, with the
styles and scripts of ``assets`` inside, and the nodes as a block of JSON (``page_data``) that the scripts draw.
"""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_graph.errors import AmpGraphError
from amp_graph.passes.graph.graph_text import CapturedNode
from amp_graph.report.graph_facts import facts_of, predicted_lines, short_place, size_text, split_reason
from amp_graph.report.records import WEIGHT, GraphReport, NodeReport
from amp_graph.report.report_text import accuracy_text, collective_lines

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report
    from amp_graph.report.records import GraphReport

HERE = Path(__file__).parent
TEMPLATES = [HERE.with_name(room) / "templates" for room in ("report", "audit", "search")]
STYLES = ("page.css", "tree.css", "graph.css", "table.css")
# In the order of use: each may use what those before it define.
LIBRARIES = ("vendor/dagre.min.js", "vendor/panzoom.min.js")
SCRIPTS = ("dom.js", "data.js", "tree.js", "items.js", "layout.js", "draw.js", "panel.js", "details.js", "search.js",
           "reasons.js", "table.js", "main.js")  # fmt: skip
FRAME_HEIGHT = 800  # pixels of a notebook


def html_page(report: Report) -> str:
    """Return ``report`` as a whole page."""
    scripts = [asset(name) for name in LIBRARIES]
    scripts.append("\n".join(('"use strict";', *map(asset, SCRIPTS))))
    return str(
        template("page.html").render(
            report=report,
            summary=report.summary(),
            accuracy=accuracy_text(report.policy.accuracy),
            slow=list(
                dict.fromkeys(line for graph in report.graphs for line in predicted_lines(graph, only_slow=True))
            ),
            collectives=list(collective_lines(report)),
            facts=[  # of each graph as a whole: its breaks, failures, budget, and what passes skipped
                [
                    f"{label}: {line}" if label else line
                    for label, text in facts_of(graph).items()
                    for line in text.split("\n")
                ]
                for graph in report.graphs
            ],
            data=page_data(report),
            styles="\n".join(map(asset, STYLES)),
            scripts=scripts,
            # The words of a content security policy that permits these scripts and no others.
            hashes=" ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts),
        )
    )


def notebook_frame(report: Report) -> str:
    """Return the page in a frame of its own, so that its styles and a notebook's do not meet."""
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:1px solid #8884"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(html_page(report))}"></iframe>'


@cache
def asset(name: str) -> str:
    """Return a style or script, without the mark of a source map that the page does not have."""
    lines = (HERE / "assets" / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL="))


@cache
def template(name: str) -> Any:
    """Return a template of Jinja's, which escapes all that it is given; it may extend another."""
    try:
        import jinja2
    except ImportError as error:
        raise AmpGraphError(
            "report: the package jinja2, which makes the HTML page, is not installed\n"
            "  legal: report.text(), report.to_dict() without it\n  fix:   pip install 'amp-graph[report]'"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size_text, "place": page_place, "quantity": _quantity, "seconds": seconds_text}
    return environment.get_template(name)


def _quantity(number: float, unit: str) -> str:
    """``9.7 GFLOP`` for a number of a unit."""
    for prefix in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} T{unit}"


def seconds_text(seconds: float) -> str:
    """``12.3 ms`` for a time."""
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


# -- the block of JSON that the scripts of the page read -----------------------------------------------
# Each text once, each property of the nodes as a column: {"strings": ["", "add"], "graphs": [{"after": {"op": [1]}}]}.


ELSEWHERE = re.compile(
    r"^(?:[A-Za-z]:)?[/\\](?:(?!\.py:).)*?(?=[^/\\]+[/\\][^/\\:]+\.py:)"
)  # all but a folder and a file
Column = Callable[[Any], str]
Number = Callable[[str], int]  # of a text in the table of all texts
SAME: dict[str, Column] = {
    "name": lambda node: node.name,
    "number": lambda node: node.number,
    "kind": lambda node: node.kind,
    "op": lambda node: node.call,
    "type": lambda node: node.type,
}
BEFORE: dict[str, Column] = {**SAME, "module": lambda node: node.module}
AFTER: dict[str, Column] = {
    **SAME,
    "module": lambda node: node.call.rpartition(".")[0] if node.kind == WEIGHT else node.module,
    "ops": lambda node: ", ".join(node.ops),
    "was": lambda node: node.captured_type,
    "precision": lambda node: node.precision,
    "cls": lambda node: node.cls,
    "words": lambda node: split_reason(node.reason, node.ops)[0],
    "figures": lambda node: split_reason(node.reason, node.ops)[1],
    "origin": lambda node: node.origin,
    "line": lambda node: page_place(node.line),
    "listed": lambda node: "" if node.listed else "unlisted",
}


def page_data(report: Report) -> dict[str, Any]:
    """Return what the scripts of the page read."""
    numbers = {"": 0}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers))

    graphs = [_graph(graph, number) for graph in report.graphs]
    return {"strings": list(numbers), "graphs": graphs}


def _graph(graph: GraphReport, number: Number) -> dict[str, Any]:
    places = {node.name: i for i, node in enumerate(graph.nodes)}
    return {
        "title": f"Graph {graph.index}: {graph.mode}, {graph.dtype}",
        "after": {
            **_side(graph.nodes, AFTER, number),
            "bytes": [node.bytes for node in graph.nodes],
            "flops": [node.flops for node in graph.nodes],
            # One cast: its node, what it casts, to which dtype, why; 1 for a weight; 1 for one that is kept.
            "casts": [
                [places[cast.name], *map(number, (cast.source, cast.to, cast.reason)), int(cast.of == WEIGHT),
                 int(cast.kept)]
                for cast in graph.casts
            ],
        },
        "before": _side(graph.captured, BEFORE, number),
    }  # fmt: skip


def _side(
    nodes: Sequence[NodeReport | CapturedNode], columns: dict[str, Column], number: Number
) -> dict[str, list[Any]]:
    places = {node.name: i for i, node in enumerate(nodes)}
    edges = [place for i, node in enumerate(nodes) for source in node.sources for place in (places[source], i)]
    return {name: [number(read(node)) for node in nodes] for name, read in columns.items()} | {"edges": edges}


def page_place(place: str) -> str:
    """Return a place with a relative path: of a file elsewhere, its name and folder, as a page is passed on."""
    return ELSEWHERE.sub(".../", short_place(place))
