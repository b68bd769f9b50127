"""A graph's text line by line: colored, with reasons, or as a difference before and after.

``%3: bf16[2,4] = linear(%1, %2)  # layer1.fc | low: a matrix product``
"""

from __future__ import annotations

import difflib
import re

from torch.fx import GraphModule

from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.report.collect_records import is_cast, node_reports, parts_of
from amp_graph.report.styles import STYLES
from amp_graph.rewrite import Rewritten

Lines = list[tuple[str, str]]
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def text_lines(rewritten: Rewritten, reasons: bool = False) -> Lines:
    """Return the rewritten graph's text as (line, style), followed by its subgraphs."""
    lines: Lines = []
    for part in parts_of(rewritten):
        known = dict(node_reports(part, rewritten.dtype))
        if part.path:
            lines += [("", ""), (f"subgraph {part.path.rstrip('/')}:", "bold")]
        for node, text in zip(part.gm.graph.nodes, _own_lines(part.gm), strict=True):
            found = known.get(node)
            style = "" if found is None else STYLES.get("cast" if is_cast(node) else found.precision, "")
            if reasons and found is not None:
                text += f"{' |' if '  # ' in text else '  #'} {found.precision}: {found.reason}"
            lines.append(("  " * bool(part.path) + text, style))
    return lines


def diff_lines(rewritten: Rewritten) -> Lines:
    """Return a unified difference of the graph as captured and as rewritten.

    A node keeps the number it had as captured; inserted casts are ``%c0``, ``%c1``, other new nodes ``%n0``.
    """
    lines: Lines = []
    for part in parts_of(rewritten):
        name = part.path.rstrip("/") or "graph"
        before = part.before.partition("\n\nsubgraph ")[0].splitlines()
        after = _renumbered(before, part.gm)
        found = difflib.unified_diff(before, after, f"{name} as captured", f"{name} as rewritten", lineterm="")
        lines += [(line, DIFF_STYLES.get(line[:1], "")) for line in found]
    return lines


def _own_lines(gm: GraphModule) -> list[str]:
    """Return the lines of ``gm`` without its subgraphs, one per node."""
    return graph_text(gm).split("\n")[: len(gm.graph.nodes)]


def _renumbered(before: list[str], gm: GraphModule) -> list[str]:
    """Return the lines of ``gm`` with the numbers that its nodes had in ``before``."""
    after = _own_lines(gm)
    casts = {i for i, node in enumerate(gm.graph.nodes) if is_cast(node)}
    kept = [i for i in range(len(after)) if i not in casts]
    names = {str(i): f"%c{count}" for count, i in enumerate(sorted(casts))}
    keys = [_key(line) for line in before], [_key(after[i]) for i in kept]
    for block in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            names[str(kept[block.b + step])] = f"%{block.a + step}"
    new = [str(i) for i in kept if str(i) not in names]
    names.update({i: f"%n{count}" for count, i in enumerate(new)})
    return [re.sub(r"%(\d+)", lambda m: names[m[1]], line) for line in after]


def _key(line: str) -> str:
    """Return a node's call and module, without its number, type and arguments."""
    call = re.sub(r"^%\d+(: .*?)? = ", "", line)
    return re.sub(r"\(.*\)", "", call) if not line.startswith("return") else "return"
