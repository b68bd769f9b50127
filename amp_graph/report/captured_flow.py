"""The graph as captured, read from its text, for the page that shows it beside the rewritten one.

Before: ``%8: f32[8,32] = linear(%5, %6, %7)  # fc``. After: a ``CapturedNode`` "linear" in ``fc``, which reads three.
The graph was rewritten in place: its text, and the names of its nodes, are what is left of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from amp_graph.report.records import CapturedNode

NODE = re.compile(r"%\d+(?:: (.*?))? = (input |attribute |)(.*)", re.DOTALL)
CALL = re.compile(r"([^(]*)\((.*)\)(?:  # (.*))?", re.DOTALL)
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
READ = re.compile(r"%(\d+)")
FLOATS = re.compile(r"\b(?:b?f\d+)\[")
# What converts a dtype, by the name that the text of a graph has for it.
CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "convert_element_type"}
)


def captured_nodes(path: str, before: str, names: Sequence[str], weights: Collection[str]) -> Iterator[CapturedNode]:
    """Yield the nodes of the graph at ``path`` as captured, read from its text ``before``.

    names: those of its nodes. weights: the names of the model's parameters and buffers.
    """
    types: list[str] = []
    for number, (name, line) in enumerate(zip(names, _split(before, len(names)), strict=False)):
        kind, call, type, module, arguments = _parsed(line, weights)
        read = [int(i) for i in READ.findall(STRING.sub("", arguments))]
        sources = dict.fromkeys(i for i in read if i < number)
        if kind == "operation" and _converts(call, type, [types[i] for i in sources]):
            kind = "cast"
        types.append(type)
        read_names = tuple(path + names[i] for i in sources)
        yield CapturedNode(path + name, f"{path}%{number}", kind, call, type, module, read_names, line)


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
