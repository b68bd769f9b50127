"""What two reports differ in: the operations that changed precision, and the casts, with the reasons of both.

``amp_graph.report(a).diff(amp_graph.report(b)).text()``; either may be a dict that ``to_dict`` made, read from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import shortened
from amp_graph.report.reasons import split_reason

SETTINGS = ("model", "policy", "dtype", "compile")
MOST = 20  # rows of a kind in the text
FORMAT = 1
# What is read of a node and of a cast.
NODE: dict[str, Any] = {**dict.fromkeys(("name", "module", "precision", "reason", "cls"), str), "ops": (list, tuple)}
CAST: dict[str, Any] = dict.fromkeys(("source", "to", "reason"), str)


@dataclass(frozen=True)
class Changed:
    """An operation in another precision, or in one report only: its precision is then "" in the other."""

    graph: int
    name: str
    ops: str
    module: str
    before: str
    after: str
    reason_before: str
    reason_after: str


@dataclass(frozen=True)
class CastChange:
    """A cast in one report only: "added" or "removed"; ``number`` of them are of the same value, dtype and reason."""

    graph: int
    change: str
    source: str
    to: str
    reason: str
    number: int = 1


@dataclass(frozen=True)
class ReportDiff:
    """The differences of two reports; false where there are none.

    ``settings``: the policy and the like, before and after. ``captures``: numbers of graphs, where they differ.
    """

    settings: dict[str, tuple[str, str]]
    captures: tuple[int, int]
    nodes: tuple[Changed, ...]
    casts: tuple[CastChange, ...]

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return bool(self.settings or self.nodes or self.casts or self.captures[0] != self.captures[1])

    def text(self) -> str:
        """Return the differences as lines, like ones together."""
        return "\n".join(_lines(self)) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the differences as text."""
        return self.text()


def diff_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> ReportDiff:
    """Return the differences of two reports, each as ``Report.to_dict`` returns it."""
    for told in (before, after):
        wrong = _what_is_wrong(told)
        if wrong:
            raise AmpGraphError(
                f"diff: {wrong}: it is not a report of format {FORMAT}\n"
                "  legal: a Report, or what its to_dict() returned\n"
                "  fix:   amp_graph.report(model).diff(json.load(open('report.json')))"
            )
    pairs = list(zip(before["graphs"], after["graphs"], strict=False))
    return ReportDiff(
        {key: (str(before[key]), str(after[key])) for key in SETTINGS if before[key] != after[key]},
        (len(before["graphs"]), len(after["graphs"])),
        tuple(row for a, b in pairs for row in _changed(a, b)),
        tuple(row for a, b in pairs for row in _cast_changes(a, b)),
    )


def _what_is_wrong(told: Any) -> str:
    """Return why ``told`` cannot be compared; "" if it can."""
    if not isinstance(told, Mapping):
        return f"a {type(told).__name__} in the place of a dict"
    if type(told.get("format")) is not int or told["format"] != FORMAT:
        return f"its format is {shortened(told.get('format'), 40)}"
    missing = [key for key in SETTINGS if key not in told]
    if missing:
        return f"it has no {missing[0]!r}"
    if not isinstance(told.get("graphs"), (list, tuple)):
        return "it has no list of graphs"
    return next((wrong for graph in told["graphs"] if (wrong := _wrong_graph(graph))), "")


def _wrong_graph(graph: Any) -> str:
    if not isinstance(graph, Mapping) or type(graph.get("index")) is not int:
        return "a graph has no index"
    for part, fields in (("nodes", NODE), ("casts", CAST)):
        rows = graph.get(part)
        if not isinstance(rows, (list, tuple)):
            return f"graph {graph['index']} has no list of {part}"
        for row in rows:
            known = isinstance(row, Mapping) and all(isinstance(row.get(name), kind) for name, kind in fields.items())
            if not known:
                return f"graph {graph['index']} has {shortened(row, 80)} in its {part}"
            if part == "nodes" and not all(isinstance(op, str) for op in row["ops"]):
                return f"graph {graph['index']} has {shortened(row['ops'], 80)} as operators"
    return ""


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Changed]:
    a, b = ({node["name"]: node for node in graph["nodes"] if _is_planned(node)} for graph in (before, after))
    for name in dict.fromkeys((*a, *b)):
        old, new = a.get(name), b.get(name)
        node = new or old
        assert node is not None, "the name is of one of them"
        was, now = (found["precision"] if found else "" for found in (old, new))
        if was != now:
            reasons = [split_reason(found["reason"], found["ops"])[0] if found else "" for found in (old, new)]
            ops = ", ".join(op.removeprefix("aten.") for op in node["ops"])
            yield Changed(before["index"], name, ops, node["module"], was, now, reasons[0], reasons[1])


def _is_planned(node: Mapping[str, Any]) -> bool:
    return node["cls"] not in ("cast", "")


def _cast_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[CastChange]:
    a, b = (_counted(graph["casts"]) for graph in (before, after))
    for key in dict.fromkeys((*a, *b)):
        more = b.get(key, 0) - a.get(key, 0)
        if more:
            yield CastChange(before["index"], "added" if more > 0 else "removed", *key, number=abs(more))


def _counted(casts: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for cast in casts:
        key = (str(cast["source"]), str(cast["to"]), str(cast["reason"]))
        found[key] = found.get(key, 0) + 1
    return found


def _lines(diff: ReportDiff) -> Iterator[str]:
    if not diff:
        yield "no difference"
    yield from (f"{key}: {a} -> {b}" for key, (a, b) in diff.settings.items())
    if diff.captures[0] != diff.captures[1]:
        yield f"graphs: {diff.captures[0]} -> {diff.captures[1]}; those with an equal in the other are compared"
    if diff.nodes:
        yield f"{len(diff.nodes)} operations changed precision:"
    rows = [_told(node) for node in diff.nodes]
    yield from _few(rows)
    if diff.casts:
        sums = {change: sum(c.number for c in diff.casts if c.change == change) for change in ("added", "removed")}
        yield f"casts: {sums['added']} added, {sums['removed']} removed"
    yield from _few([f"  {c.change} {c.source} -> {c.to}: {c.reason}" for c in diff.casts])


def _told(node: Changed) -> str:
    where = f" in {node.module}" if node.module else ""
    why = node.reason_after or node.reason_before
    return f"  {node.before or '(absent)'} -> {node.after or '(absent)'}  {node.name} ({node.ops}){where}: {why}"


def _few(rows: list[str]) -> list[str]:
    return rows if len(rows) <= MOST else [*rows[:MOST], f"  and {len(rows) - MOST} more: to_dict() has all"]
