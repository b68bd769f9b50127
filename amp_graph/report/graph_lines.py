"""A graph's text line by line: colored, with reasons, or as a difference before and after.

``%3: bf16[2,4] = linear(%1, %2)  # layer1.fc | low: a matrix product``
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from amp_graph.report.records import GraphReport, NodeReport

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
