"""``amp-graph dump``: prints the captured graphs of a model, before and after, in one of several formats."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Sequence

from amp_graph.cli.capture_target import captured, captured_step
from amp_graph.cli.terminal import Told, json_text
from amp_graph.errors import AmpGraphError
from amp_graph.passes.graph.graph_text import CapturedNode
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.report.model_report import report
from amp_graph.report.records import GraphReport
from amp_graph.report.report_html import html_page

VIEWS = ("before", "diff", "reasons")  # of the text


def run(args: argparse.Namespace) -> Told:
    """Capture TARGET and tell its graphs, or write them."""
    chosen = [f"--{name}" for name in (*VIEWS, "step") if getattr(args, name)]
    if args.format != "text" and chosen and (chosen, args.format) != (["--step"], "json"):
        raise AmpGraphError(
            f"dump: {chosen[0]} needs --format text, and --format is {args.format}\n"
            f"  legal: --format text\n  fix:   amp-graph dump {args.target} {chosen[0]}"
        )
    if args.step:
        text = captured_step(args) + "\n"
        text = json_text({"optimizer": args.step, "graph": text}) if args.format == "json" else text
    else:
        told = report(captured(args).model)
        forms: dict[str, Callable[[], str]] = {
            "json": lambda: json_text(told.to_dict()),
            "html": lambda: html_page(told),
            "report": lambda: told.text(skipped=args.skipped),
            "text": lambda: "\n".join("".join(f"{line}\n" for line in _lines(args, graph)) for graph in told.graphs),
        }
        text = forms[args.format]()
    if args.output is not None:
        write_or_refuse(args.output, text, "dump", "--output graphs.txt")
    return Told(text, [text.removesuffix("\n")] if args.output is None else ())


def _lines(args: argparse.Namespace, graph: GraphReport) -> Iterator[str]:
    """Yield what was asked for: the graph as captured, the difference, or the graph as rewritten."""
    yield f"# {graph.title}"
    if args.before:
        yield from graph.before.splitlines()
    elif args.diff:
        yield from diff_lines(graph)
    else:
        yield from text_lines(graph, reasons=args.reasons)
    if graph.break_reason:
        yield f"# ends in a graph break: {graph.break_reason} ({graph.break_line})"


def text_lines(graph: GraphReport, *, reasons: bool = False) -> Iterator[str]:
    """Yield the lines of the rewritten graph's text, followed by its subgraphs."""
    for line, node in graph.lines():
        if node is None or not reasons or not node.reason:
            yield line
        else:
            yield f"{line}{' |' if '  # ' in line else '  #'} {node.precision}: {node.reason}"


def diff_lines(graph: GraphReport) -> Iterator[str]:
    """Yield a unified difference of the graph as captured and as rewritten, and of each subgraph.

    Nodes have their names in place of their numbers, which differ.
    """
    for path in dict.fromkeys(node.path for node in graph.nodes):
        name = path.rstrip("/") or "graph"
        before, after = _named(graph.captured, path), _named(graph.nodes, path)
        yield from difflib.unified_diff(before, after, f"{name} as captured", f"{name} as rewritten", lineterm="")


def _named(of_graph: Sequence[CapturedNode], path: str) -> list[str]:
    nodes = [node for node in of_graph if node.path == path]
    names = [node.name.removeprefix(path) for node in nodes]
    return [re.sub(r"%(\d+)", lambda found: f"%{names[int(found[1])]}", node.text) for node in nodes]
