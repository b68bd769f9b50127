"""``amp-graph dump``: prints the captured graphs of a model, before and after, in one of several formats."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

from amp_graph.cli.capture_target import captured, captured_step
from amp_graph.cli.measure_target import measured_times
from amp_graph.cli.terminal import write_json, write_lines, write_table
from amp_graph.errors import AmpGraphError
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.report.graph_lines import Lines, diff_lines, style_of, text_lines
from amp_graph.report.model_report import Report, report
from amp_graph.report.networkx_graph import dot, graphml
from amp_graph.report.records import GraphReport
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
