"""``amp-graph explain``: prints all that is known about one node.

Its operations, class and list entry, its precision with the reason, its inputs with their casts, its line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from amp_graph.cli.capture_target import captured
from amp_graph.cli.command_lists import entry_of, rule_lines, rule_row
from amp_graph.cli.terminal import Told
from amp_graph.errors import AmpGraphError
from amp_graph.lists.read_toml import did_you_mean
from amp_graph.policy import Policy
from amp_graph.report.model_report import report
from amp_graph.report.records import CALLS, GraphReport, NodeReport

Explained = tuple[GraphReport, NodeReport]


def run(args: argparse.Namespace) -> Told:
    """Capture TARGET and explain the nodes that NODE names."""
    told = report(captured(args).model)
    nodes = [(graph, node) for graph in told.graphs for node in graph.nodes if node.kind != "output"]
    chosen = _chosen(nodes, args.node)
    if not chosen:
        known = {name for _, node in nodes for name in (*names_of(node), *_groups(node))} - {""}
        raise AmpGraphError(
            f"explain: no node {args.node!r}{did_you_mean(args.node, known)}\n"
            "  legal: a node's name or number (%7, 1:%7 in graph 1), an input, a module's path, an operation,\n"
            "         a key as keep_ops takes it (layers.3:add.1)\n"
            "  fix:   amp-graph dump TARGET --format text shows the numbers"
        )
    found = [facts_of(graph, node, told.policy) for graph, node in chosen]
    return Told(found, (line for facts in found for line in _lines(**facts)))


def _lines(node: str, number: str, graph: int, mode: str, **facts: str | list[str]) -> Iterator[str]:
    yield f"{node} ({number}) in graph {graph} ({mode})"
    for heading, told in facts.items():
        yield from (f"  {heading:<11}{line}" for line in ([told] if isinstance(told, str) else told))


def _chosen(nodes: Sequence[Explained], name: str) -> Sequence[Explained]:
    """Return the nodes of this name, in any graph or, as in ``1:%7``, in that of the number before it."""
    index, _, rest = name.partition(":")
    inside = [(graph, node) for graph, node in nodes if str(graph.index) == index]
    for names in (names_of, _groups):
        for searched, wanted in ((nodes, name), (inside, rest)):
            if found := [one for one in searched if wanted in names(one[1])]:
                return found
    return ()


def names_of(node: NodeReport) -> tuple[str, ...]:
    """Return the names that a node has alone in its graph: its name, number and key, an input's own name."""
    return node.name, node.number, node.path + _shown(node), node.key


def _groups(node: NodeReport) -> tuple[str, ...]:
    """Return names that several nodes may have: its module, and operations, with and without their namespace."""
    return (node.module if node.cls else "", *node.ops, *(op.partition(".")[2] for op in node.ops))


def _shown(node: NodeReport) -> str:
    """Return a node's displayed name: an input's own name, or the node's name."""
    return node.name.removeprefix(node.path) if node.kind in CALLS else node.call


def facts_of(graph: GraphReport, node: NodeReport, policy: Policy) -> dict[str, Any]:
    """Return all that is known about a node, by heading; a list has a line for each of its entries."""
    facts: dict[str, Any] = {"node": node.name, "number": node.number, "graph": graph.index,
                             "mode": f"{'train' if graph.training else 'eval'}, {policy}"}  # fmt: skip
    read_by = [
        f"{one.number} {_shown(one)}: {one.type or one.kind}{f', a cast: {one.reason}' * (one.kind == 'cast')}"
        for one in graph.nodes if node.name in one.sources
    ]  # fmt: skip
    if node.kind not in CALLS:
        return facts | {"input": f"{node.call}: {node.type}", "read by": read_by}
    done = dict.fromkeys(note for note in (*graph.changes, *graph.skips) if note.node == node.name)
    return facts | {
        "operation": ", ".join(node.ops),
        "key": node.key or "none",
        "module": node.module or "(root)",
        "line": node.line or "not recorded",
        "class": f"{node.cls or 'none'}{'' if node.listed else ', which no list names'}",
        "precision": node.precision,
        "reason": node.reason,
        "value": f"{node.type or 'none'}, as captured {node.captured_type or 'none'}",
        "list entry": _entry(graph, node, policy),
        "inputs": list(_inputs(graph, node)),
        "read by": read_by,
        "passes": [f"{note.rule}: {note.action}: {note.reason}" for note in done],
    }


def _entry(graph: GraphReport, node: NodeReport, policy: Policy) -> list[str]:
    """Return the list's entry that decided the class."""
    rules = (entry_of(policy.op_list(graph.device), op, node.origin) for op in node.ops if node.origin)
    rule = next(filter(None, rules), None)
    return rule_lines(rule_row(rule)) if rule is not None else [node.origin] if node.origin else []


def _inputs(graph: GraphReport, node: NodeReport) -> Iterator[str]:
    nodes = {one.name: one for one in graph.nodes}
    for source in map(nodes.__getitem__, node.sources):
        cast = ""
        if source.kind == "cast":
            origin = nodes[source.sources[0]]
            cast = f", cast from {_shown(origin)} ({origin.number}: {origin.type})"
        yield f"{source.number} {_shown(source)}: {source.type or 'a graph'}{cast}"
