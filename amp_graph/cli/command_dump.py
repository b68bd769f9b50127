"""``amp-graph dump``: prints the captured graphs of a model, before and after, in one of several formats."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

from amp_graph.cli.capture_target import captured, captured_step
from amp_graph.cli.command_cost import measured_times
from amp_graph.cli.terminal import write_json, write_lines, write_table
from amp_graph.errors import AmpGraphError
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.report.model_report import Report, report
from amp_graph.report.networkx_graph import dot, graphml
from amp_graph.report.records import GraphReport, NodeReport
from amp_graph.report.report_html import html_page

COLUMNS = ("node", "operation", "type", "precision", "reason")
WHOLE: dict[str, Callable[[Report], str]] = {"dot": dot, "graphml": graphml, "html": html_page}


def run(args: argparse.Namespace) -> int:
    """Capture TARGET and print its graphs."""
    _check(args)
    if args.step:
        text = captured_step(args)
        with _opened(args.output) as out:
            out.write((json.dumps({"optimizer": args.step, "graph": text}) if args.format == "json" else text) + "\n")
        return 0
    found = captured(args)
    told = report(found.model)
    with _opened(args.output) as out:
        if args.format == "json":
            write_json(told.to_dict(), out)
        elif args.format == "report":
            out.write(told.text(skipped=args.skipped))
        elif args.format in WHOLE:
            out.write(WHOLE[args.format](told))
        else:
            for graph, record in zip(told.graphs, found.graphs, strict=True):
                _write_graph(args, graph, record.rewritten.gm.code, out)
    if args.report:
        write_page(replace(told, times=measured_times(args) if args.measure else {}), args.report, "dump")
    return 0


def write_page(told: Report, path: str, command: str, chosen: str = "") -> None:
    """Write the HTML page of a report, opened at the node ``chosen``; AmpGraphError if that is not possible."""
    write_or_refuse(path, html_page(told, chosen), command, "--report report.html")


def _check(args: argparse.Namespace) -> None:
    chosen = [name for name in ("before", "diff", "reasons") if getattr(args, name)]
    chosen += ["step"] if args.step and args.format != "json" else []
    if args.measure and not args.report:
        raise AmpGraphError(
            "dump: --measure is for the report\n  legal: --measure with --report\n"
            f"  fix:   amp-graph dump {args.target} --measure --report report.html"
        )
    if args.step and args.report:
        raise AmpGraphError(
            "dump: --report is of a model's graphs, and --step prints that of a whole step\n"
            f"  legal: one of them\n  fix:   amp-graph dump {args.target} --report {args.report}"
        )
    if chosen and args.format != "text":
        raise AmpGraphError(
            f"dump: --{chosen[0]} needs --format text, and --format is {args.format}\n"
            f"  legal: --format text\n  fix:   amp-graph dump {args.target} --{chosen[0]}"
        )


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    out = io.StringIO()
    yield out
    write_or_refuse(path, out.getvalue(), "dump", "--output graphs.txt")


def _write_graph(args: argparse.Namespace, graph: GraphReport, code: str, out: TextIO) -> None:
    gap: Lines = [("", "")] if graph.index else []
    write_lines([*gap, (f"# {graph.title}", "bold")], out)
    if args.format == "code":
        write_lines([(line, "") for line in code.strip().splitlines()], out)
    elif args.format == "table":
        rows = [
            ((n.number, ", ".join(n.ops), n.type, n.precision, n.reason), style_of(n))
            for n in graph.nodes
            if n.precision
        ]
        write_table(COLUMNS, rows, out)
    else:
        _write_text(args, graph, out)


def _write_text(args: argparse.Namespace, graph: GraphReport, out: TextIO) -> None:
    """Print the requested ones of before, after and the difference; by default, after."""
    chosen = [name for name in ("before", "after", "diff") if getattr(args, name)] or ["after"]
    shown: dict[str, Lines] = {
        "before": [(line, "") for line in graph.before.splitlines()],
        "after": text_lines(graph, reasons=args.reasons),
        "diff": diff_lines(graph),
    }
    for name in chosen:
        if len(chosen) > 1:
            write_lines([(f"# {name}", "bold")], out)
        write_lines(shown[name] or [("# no difference", "")], out)
    if graph.break_reason:
        write_lines([(f"# ends in a graph break: {graph.break_reason} ({graph.break_line})", "red")], out)


# -- lines of a graph ---------------------------------------------------------------------------------


Lines = list[tuple[str, str]]
STYLES = {"low": "green", "full": "yellow", "cast": "magenta"}  # of precisions, in a terminal's words
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def style_of(node: NodeReport) -> str:
    """Return the style of a node: that of its precision, or of a cast."""
    return STYLES.get("cast" if node.cls == "cast" else node.precision, "")


def text_lines(graph: GraphReport, *, reasons: bool = False) -> Lines:
    """Return the rewritten graph's text as (line, style), followed by its subgraphs."""
    lines: Lines = []
    for line, node in graph.lines():
        if node is None:
            lines.append((line, "bold" if line else ""))
            continue
        because = f"{' |' if '  # ' in line else '  #'} {node.precision}: {node.reason}"
        lines.append((line + because if reasons and node.reason else line, style_of(node)))
    return lines


def diff_lines(graph: GraphReport) -> Lines:
    """Return a unified difference of the graph as captured and as rewritten, and of each subgraph.

    A node keeps the number it had as captured; inserted casts are ``%c0``, ``%c1``, other new nodes ``%n0``.
    """
    lines: Lines = []
    for path in dict.fromkeys(node.path for node in graph.nodes):
        name = path.rstrip("/") or "graph"
        before = [node.text for node in graph.captured if node.path == path]
        after = _renumbered(before, [node for node in graph.nodes if node.path == path])
        found = difflib.unified_diff(before, after, f"{name} as captured", f"{name} as rewritten", lineterm="")
        lines += [(line, DIFF_STYLES.get(line[:1], "")) for line in found]
    return lines


def _renumbered(before: list[str], nodes: Sequence[NodeReport]) -> list[str]:
    """Return the lines of ``nodes`` with the numbers that they had in ``before``."""
    casts = [i for i, node in enumerate(nodes) if node.kind == "cast"]
    kept = [i for i, node in enumerate(nodes) if node.kind != "cast"]
    names = {str(i): f"%c{count}" for count, i in enumerate(casts)}
    keys = [_key(line) for line in before], [_key(nodes[i].text) for i in kept]
    for block in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            names[str(kept[block.b + step])] = f"%{block.a + step}"
    names |= {str(i): f"%n{count}" for count, i in enumerate(i for i in kept if str(i) not in names)}
    return [re.sub(r"%(\d+)", lambda m: names[m[1]], node.text) for node in nodes]


def _key(line: str) -> str:
    """Return a node's call and module, without its number, type and arguments."""
    call = re.sub(r"^%\d+(: .*?)? = ", "", line)
    return re.sub(r"\(.*\)", "", call) if not line.startswith("return") else "return"
