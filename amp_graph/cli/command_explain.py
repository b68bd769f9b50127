"""``amp-graph explain``: prints all that is known about one node.

Its operations, class and list entry, its precision with the reason, its inputs with their casts, its line.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from amp_graph.capture.captured_graphs import Captured
from amp_graph.capture.conversion import Conversion
from amp_graph.cli.capture_target import captured
from amp_graph.cli.command_dump import write_page
from amp_graph.cli.command_lists import entry_of, rule_lines
from amp_graph.cli.terminal import write_json, write_lines
from amp_graph.devices import device_of
from amp_graph.errors import AmpGraphError
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.report.collect_records import Part, is_cast, node_reports, numbered, parts_of, shown_name
from amp_graph.report.model_report import report
from amp_graph.report.records import NodeReport


@dataclass(frozen=True)
class Found:
    """A node, its graph, and its record (inputs have none)."""

    index: int
    record: Captured
    part: Part
    node: Node
    number: str
    told: NodeReport | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a user may refer to the node."""
        name, number = self.part.path + self.node.name, self.part.path + self.number
        plain = (name, number, self.part.path + shown_name(self.node))
        return (*plain, *(f"{self.index}:{one}" for one in plain))

    @property
    def module(self) -> str:
        """The module of an operation; "" for plumbing nodes."""
        return self.told.module if self.told and self.told.cls else ""

    @property
    def operations(self) -> tuple[str, ...]:
        """The node's operations, with and without their namespace: ``aten.linear``, ``linear``."""
        ops = self.told.ops if self.told else ()
        return (*ops, *(op.partition(".")[2] for op in ops))


def run(args: argparse.Namespace) -> int:
    """Capture TARGET and explain the nodes that NODE names."""
    conversion = captured(args.target, args.input, args.policy, args.training)
    nodes = list(_nodes(conversion))
    chosen = [one for one in nodes if args.node in (*one.names, one.module)]
    chosen = chosen or [one for one in nodes if args.node in one.operations]
    if not chosen:
        raise AmpGraphError(_unknown(args.node, nodes))
    if args.report:
        write_page(report(conversion.model), args.report, "explain", f"{chosen[0].index}:{chosen[0].names[0]}")
    if args.json:
        write_json([_as_dict(one) for one in chosen], sys.stdout)
        return 0
    for position, one in enumerate(chosen):
        lines = [""] * bool(position) + _explained(one)
        write_lines([(line, "" if line.startswith(" ") else "bold") for line in lines], sys.stdout)
    return 0


def _nodes(conversion: Conversion) -> Iterator[Found]:
    for index, record in enumerate(conversion.graphs):
        for part in parts_of(record.rewritten):
            told = dict(node_reports(part, record.rewritten.dtype))
            for node, number in numbered(part.gm).items():
                if node.op != "output":
                    yield Found(index, record, part, node, number, told.get(node))


def _unknown(name: str, nodes: list[Found]) -> str:
    known = {n for one in nodes for n in (one.names[0], one.names[2], one.module, *one.operations)} - {""}
    near = difflib.get_close_matches(name, sorted(known), 5, 0.5) or sorted(known)[:5]
    return (
        f"explain: no node {name!r}; similar: {', '.join(near)}\n"
        "  legal: a node's name or number (%7, 1:%7 in graph 1), an input, a module's path, an operation\n"
        "  fix:   amp-graph dump TARGET --format text shows the numbers"
    )


def _explained(one: Found) -> list[str]:
    lines = [f"{one.part.path}{one.node.name} ({one.number}) in graph {one.index} ({_mode(one)})"]
    if one.told is None:
        lines.append(f"  input      {shown_name(one.node)}: {type_text(value(one.node))}")
        return lines + list(_readers(one))
    lines += [f"  {name:<11}{text}" for name, text in _facts(one.told).items()]
    return [*lines, *_entry(one, one.told), *_inputs(one), *_readers(one), *_said(one)]


def _mode(one: Found) -> str:
    return f"{'train' if one.record.training else 'eval'}, {one.record.rewritten.policy}"


def _facts(told: NodeReport) -> dict[str, str]:
    return {
        "operation": ", ".join(told.ops),
        "module": told.module or "(root)",
        "line": told.line or "not recorded",
        "class": f"{told.cls or 'none'}{'' if told.listed else ', which no list names'}",
        "precision": told.precision,
        "reason": told.reason,
        "value": f"{told.type or 'none'}, as captured {told.captured_type or 'none'}",
    }


def _as_dict(one: Found) -> dict[str, object]:
    """Return all that is known about a node; its lines of text stand under the names of their first words."""
    told: dict[str, object] = {
        "node": one.part.path + one.node.name, "number": one.number, "graph": one.index, "mode": _mode(one),
    }  # fmt: skip
    if one.told is None:
        told["value"] = type_text(value(one.node))
    else:
        told |= _facts(one.told) | {"list entry": _plain(_entry(one, one.told)), "passes": _plain(_said(one))}
        told["inputs"] = [line.removeprefix("input").strip() for line in _plain(_inputs(one))]
    return told | {"read by": [line.removeprefix("read by").strip() for line in _plain(_readers(one))]}


def _plain(lines: Iterable[str]) -> list[str]:
    return [line.strip() for line in lines]


def _entry(one: Found, told: NodeReport) -> Iterator[str]:
    """Yield the list's entry that decided the class."""
    if not told.origin:
        return
    lists = one.record.rewritten.policy.op_list(device_of(one.record.rewritten.gm))
    for op in told.ops:
        rule = entry_of(lists, op, told.origin)
        if rule is not None:
            yield "  list entry"
            yield from (f"    {line}" for line in rule_lines(rule))
            return
    yield f"  list entry {told.origin}"


def _inputs(one: Found) -> Iterator[str]:
    numbers = numbered(one.part.gm)
    for source in one.node.all_input_nodes:
        cast = ""
        if is_cast(source):
            origin = source.args[0]
            assert isinstance(origin, Node), "a cast has an input"
            cast = f", cast from {shown_name(origin)} ({numbers[origin]}: {type_text(value(origin))})"
        shown = shown_name(source)
        yield f"  input      {numbers[source]} {shown}: {type_text(value(source)) or 'a graph'}{cast}"


def _readers(one: Found) -> Iterator[str]:
    numbers = numbered(one.part.gm)
    for reader in one.node.users:
        why = f", a cast: {reader.meta[CAST]}" if is_cast(reader) else ""
        yield f"  read by    {numbers[reader]} {reader.name}: {type_text(value(reader)) or reader.op}{why}"


def _said(one: Found) -> Iterator[str]:
    """Yield the passes' changes and skips at the node, each once."""
    for timed in one.record.rewritten.passes if not one.part.passes else one.part.passes:
        changes = [(c.node, f"{c.action}: {c.reason}") for c in timed.result.changes]
        skips = [(s.node, f"skipped: {s.reason}") for s in timed.result.skips]
        for node, text in dict.fromkeys([*changes, *skips]):
            if node == one.node.name and timed.name != "plan-precision":
                yield f"  {timed.name}: {text}"
