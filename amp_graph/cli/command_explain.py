"""``amp-graph explain``: prints all that is known about one node.

Its operations, class and list entry, its precision with the reason, its inputs with their casts, its line.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from amp_graph.cli.capture_target import captured
from amp_graph.cli.command_dump import write_page
from amp_graph.cli.command_lists import entry_of, rule_lines, rule_row
from amp_graph.cli.terminal import write_json, write_lines
from amp_graph.errors import AmpGraphError
from amp_graph.policy import Policy
from amp_graph.report.model_report import report
from amp_graph.report.records import CALLS, GraphReport, NodeReport

Facts = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A node in its graph."""

    graph: GraphReport
    node: NodeReport

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a user may refer to the node."""
        plain = (self.node.name, self.node.number, self.node.path + _shown(self.node))
        return (*plain, *(f"{self.graph.index}:{one}" for one in plain))

    @property
    def others(self) -> tuple[str, ...]:
        """Names that several nodes may have: operations, with and without their namespace."""
        return (*self.node.ops, *(op.partition(".")[2] for op in self.node.ops))


def run(args: argparse.Namespace) -> int:
    """Capture TARGET and explain the nodes that NODE names."""
    told = report(captured(args).model)
    nodes = [Found(graph, node) for graph in told.graphs for node in graph.nodes if node.kind != "output"]
    chosen = [one for one in nodes if args.node in (*one.names, one.node.module if one.node.cls else "")]
    chosen = chosen or [one for one in nodes if args.node in one.others]
    if not chosen:
        raise AmpGraphError(_unknown(args.node, nodes))
    if args.report:
        write_page(told, args.report, "explain", f"{chosen[0].graph.index}:{chosen[0].node.name}")
    found = [_facts(one, told.policy) for one in chosen]
    if args.json:
        write_json(found, sys.stdout)
        return 0
    for position, facts in enumerate(found):
        lines = [""] * bool(position) + _lines(facts)
        write_lines([(line, "" if line.startswith(" ") else "bold") for line in lines], sys.stdout)
    return 0


def _shown(node: NodeReport) -> str:
    """Return a node's displayed name: an input's own name, or the node's name."""
    return node.name.removeprefix(node.path) if node.kind in CALLS else node.call


def _unknown(name: str, nodes: list[Found]) -> str:
    known = {n for one in nodes for n in (one.names[0], one.names[2], one.node.module, *one.others)} - {""}
    near = difflib.get_close_matches(name, sorted(known), 5, 0.5) or sorted(known)[:5]
    return (
        f"explain: no node {name!r}; similar: {', '.join(near)}\n"
        "  legal: a node's name or number (%7, 1:%7 in graph 1), an input, a module's path, an operation\n"
        "  fix:   amp-graph dump TARGET --format text shows the numbers"
    )


def _facts(one: Found, policy: Policy) -> Facts:
    """Return all that is known about a node, by heading; a list has a line for each of its entries."""
    graph, node = one.graph, one.node
    mode = f"{'train' if graph.training else 'eval'}, {policy}"
    facts: Facts = {"node": node.name, "number": node.number, "graph": graph.index, "mode": mode}
    if node.kind not in CALLS:
        facts["input"] = f"{node.call}: {node.type}"
        return facts | {"read by": list(_readers(one))}
    facts |= {
        "operation": ", ".join(node.ops),
        "module": node.module or "(root)",
        "line": node.line or "not recorded",
        "class": f"{node.cls or 'none'}{'' if node.listed else ', which no list names'}",
        "precision": node.precision,
        "reason": node.reason,
        "value": f"{node.type or 'none'}, as captured {node.captured_type or 'none'}",
        "list entry": _entry(one, policy),
    }
    done = dict.fromkeys(note for note in (*graph.changes, *graph.skips) if note.node == node.name)
    passes = [f"{note.rule}: {note.action}: {note.reason}" for note in done]
    return facts | {"inputs": list(_inputs(one)), "read by": list(_readers(one)), "passes": passes}


def _lines(facts: Facts) -> list[str]:
    lines = [f"{facts['node']} ({facts['number']}) in graph {facts['graph']} ({facts['mode']})"]
    for heading, told in list(facts.items())[4:]:
        if heading == "list entry" and told:
            lines += ["  list entry", *(f"    {line}" for line in told)]
        else:
            label = "input" if heading == "inputs" else heading
            lines += [f"  {label:<11}{line}" for line in ([told] if isinstance(told, str) else told)]
    return lines


def _entry(one: Found, policy: Policy) -> list[str]:
    """Return the list's entry that decided the class."""
    lists = policy.op_list(one.graph.device)
    rules = (entry_of(lists, op, one.node.origin) for op in one.node.ops if one.node.origin)
    rule = next(filter(None, rules), None)
    return rule_lines(rule_row(rule)) if rule is not None else [one.node.origin] if one.node.origin else []


def _inputs(one: Found) -> Iterator[str]:
    nodes = {node.name: node for node in one.graph.nodes}
    for source in map(nodes.__getitem__, one.node.sources):
        cast = ""
        if source.kind == "cast":
            origin = nodes[source.sources[0]]
            cast = f", cast from {_shown(origin)} ({origin.number}: {origin.type})"
        yield f"{source.number} {_shown(source)}: {source.type or 'a graph'}{cast}"


def _readers(one: Found) -> Iterator[str]:
    for reader in one.graph.nodes:
        if one.node.name in reader.sources:
            why = f", a cast: {reader.reason}" if reader.kind == "cast" else ""
            yield f"{reader.number} {_shown(reader)}: {reader.type or reader.kind}{why}"
