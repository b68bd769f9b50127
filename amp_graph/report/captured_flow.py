"""The graph as captured, read from its text, for the page that shows it beside the rewritten one.

Before: ``%8: f32[8,32] = linear(%5, %6, %7)  # fc``. After: a ``CapturedNode`` "linear" in ``fc``, which reads three.
The graph was rewritten in place: its text, and the names of its nodes, are what is left of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from amp_graph.capture.captured_graphs import Captured
from amp_graph.report.collect_records import Part, parts_of

NODE = re.compile(r"%\d+(?:: (.*?))? = (input |attribute |)(.*)", re.DOTALL)
CALL = re.compile(r"([^(]*)\((.*)\)(?:  # (.*))?", re.DOTALL)
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
READ = re.compile(r"%(\d+)")
FLOATS = re.compile(r"\b(?:b?f\d+)\[")
# What converts a dtype, by the name that the text of a graph has for it.
CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "convert_element_type"}
)


@dataclass(frozen=True)
class CapturedNode:
    """One node of a graph as captured.

    ``kind``: "input", "weight", "constant", "operation", "cast" (a conversion of the user's own) or "output".
    ``sources``: the names of the nodes that it reads. Names and numbers are as in ``NodeReport``.
    """

    name: str
    number: str
    kind: str
    call: str
    type: str
    module: str
    sources: tuple[str, ...]


def captured_nodes(record: Captured, weights: Collection[str]) -> tuple[CapturedNode, ...]:
    """Return the nodes of one graph as captured; ``weights`` are the names of the model's parameters and buffers."""
    return tuple(node for part in parts_of(record.rewritten) for node in _nodes(part, weights))


def _nodes(part: Part, weights: Collection[str]) -> Iterator[CapturedNode]:
    lines = _split(part.before, len(part.names))
    types: list[str] = []
    for number, (name, line) in enumerate(zip(part.names, lines, strict=False)):
        kind, call, type, module, arguments = _parsed(line, weights)
        read = [int(i) for i in READ.findall(STRING.sub("", arguments))]
        sources = dict.fromkeys(i for i in read if i < number)
        if kind == "operation" and _converts(call, type, [types[i] for i in sources]):
            kind = "cast"
        types.append(type)
        names = tuple(part.path + part.names[i] for i in sources)
        yield CapturedNode(part.path + name, f"{part.path}%{number}", kind, call, type, module, names)


def _split(text: str, count: int) -> list[str]:
    """Return the lines of a graph's own nodes; none where a name with a line break makes them ambiguous."""
    own = re.split(r"\n(?=%\d+(?:: | = )|return |\n+subgraph )", text)[:count]
    is_whole = all(line.startswith((f"%{i}:", f"%{i} ", "return ")) for i, line in enumerate(own))
    return own if is_whole and len(own) == count else []


def _parsed(line: str, weights: Collection[str]) -> tuple[str, str, str, str, str]:
    """Return kind, call, type, module and arguments of a line."""
    found = NODE.fullmatch(line)
    if found is None:
        return "output", "output", "", "", line
    type, leaf, rest = found[1] or "", found[2], found[3]
    if leaf:
        kind = "weight" if rest in weights else "input" if leaf == "input " else "constant"
        return kind, rest, type, rest.rpartition(".")[0] if kind == "weight" else "", ""
    call = CALL.fullmatch(rest)
    return ("operation", call[1], type, call[3] or "", call[2]) if call else ("operation", rest, type, "", "")


def _converts(call: str, type: str, operands: list[str]) -> bool:
    """Say whether a call changes the floating-point dtype of its operand."""
    name = call.removeprefix(".").removeprefix("aten.").partition(".")[0]
    before = FLOATS.match(operands[0]) if operands else None
    after = FLOATS.match(type)
    return name in CONVERSIONS and before is not None and after is not None and before[0] != after[0]
