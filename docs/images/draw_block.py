"""Draw the picture of README.md: a transformer block before and after, as ``amp_graph.report`` gives it.

    python docs/images/draw_block.py    # writes docs/images/block.dot and, with graphviz's dot, block.svg

The two graphs are put side by side. Views and the model's parameters are left out, the casts of one linear's weight and
bias are one node, and the boxes are coloured by the dtype that the tool prints.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import amp_graph

FOLDER = Path(__file__).parent
TITLES = {
    "before": ("before: fp32, as captured", "bf16,device=cpu,keep_fp32=.*,skip=backend|recompute_activations"),
    "after": ("after amp_graph, bf16", "bf16,device=cpu,planner=paint,skip=backend|recompute_activations"),
}
VIEWS = (".unflatten", ".permute", "getitem", ".transpose", ".flatten")
FILL = {"f32": "#ffd8b0", "bf16": "#c9ebd3"}
ROUND = 'fillcolor="#e3d0ff", style="rounded,filled"'
SHORT = {"scaled_dot_product_attention": "attention"}
NODE = re.compile(r'  "0:(?P<name>[^"]+)" \[label="(?P<label>[^"]*)", fillcolor="[^"]*"(?P<shape>.*)\];')
EDGE = re.compile(r'  "0:([^"]+)" -> "0:([^"]+)";')


def dump(policy: str) -> str:
    """Return the block's graph under ``policy`` in graphviz's language."""
    sys.path.insert(0, str(FOLDER))
    model, x = importlib.import_module("block").build()
    model = amp_graph.convert(model.train(), policy)
    model(x)
    graph = amp_graph.report(model).to_networkx()
    lines = []
    for name, node in graph.nodes.items():
        kind, sizes = node["kind"], zip(node["dtype"].split("; "), node["shape"].split("; "), strict=True)
        types = ", ".join(f"{dtype}[{shape}]" for dtype, shape in sizes if dtype)
        label = json.dumps("\n".join((node["call"], types)).strip())
        shape = "" if kind in ("operation", "part") else f", shape={'ellipse' if kind == 'cast' else 'plaintext'}"
        lines.append(f'  {json.dumps(name)} [label={label}, fillcolor="white"{shape}];')
    return "\n".join([*lines, *(f"  {json.dumps(a)} -> {json.dumps(b)};" for a, b in graph.edges)])


def cluster(key: str, text: str) -> Iterator[str]:
    """Yield one of the tool's graphs as a part of the picture."""
    nodes = {m["name"]: m for m in map(NODE.match, text.splitlines()) if m}
    edges = [m.groups() for m in map(EDGE.match, text.splitlines()) if m]
    sources: dict[str, list[str]] = {}
    for source, reader in edges:
        sources.setdefault(reader, []).append(source)
    yield f'  subgraph cluster_{key} {{ label="{TITLES[key][0]}"; penwidth=0; fontsize=16;'
    weight_casts = {n for n in nodes if "ellipse" in nodes[n]["shape"] and _is_weight(nodes[sources[n][0]])}
    shown = [n for n in nodes if not _left_out(nodes[n], n in weight_casts)]
    yield from (_box(key, nodes[n]) for n in shown)
    for reader in shown:
        found = dict.fromkeys(s for source in sources.get(reader, []) for s in _through(source, nodes, sources))
        yield from (f"    {key}_{s} -> {key}_{reader};" for s in found if s in shown)
        if weight_casts.intersection(sources.get(reader, [])):
            yield f'    {key}_w_{reader} [label="cast weight, bias", {ROUND}];'
            yield f"    {{rank=same; {key}_w_{reader} -> {key}_{reader};}}"
    yield "  }"


def _is_weight(node: re.Match[str]) -> bool:
    return "plaintext" in node["shape"] and "." in node["label"].split("\\n")[0]


def _left_out(node: re.Match[str], is_weight_cast: bool) -> bool:
    return is_weight_cast or _is_weight(node) or node["label"].startswith(VIEWS)


def _through(source: str, nodes: dict[str, re.Match[str]], sources: dict[str, list[str]]) -> Iterator[str]:
    """Yield the sources of a value behind the views that are left out."""
    if source in nodes and nodes[source]["label"].startswith(VIEWS):
        for behind in sources[source]:
            yield from _through(behind, nodes, sources)
    else:
        yield source


def _box(key: str, node: re.Match[str]) -> str:
    name, _, kind = node["label"].partition("\\n")
    dtype = kind.partition("[")[0]
    is_cast = "ellipse" in node["shape"]
    plain = node["name"].startswith(("output", "return")) or "plaintext" in node["shape"]
    if is_cast:
        return f'    {key}_{node["name"]} [label="cast to {dtype}", {ROUND}];'
    label, fill = f"{SHORT.get(name, name)}\\n{kind}".removesuffix("\\n"), "white" if plain else FILL[dtype]
    return f'    {key}_{node["name"]} [label="{label}", fillcolor="{fill}"{node["shape"]}];'


def picture() -> str:
    """Return the picture in graphviz's language."""
    lines = ["digraph block {", '  nodesep=0.25; ranksep=0.2; margin=0.1; fontname="Helvetica,sans-serif";']
    look = 'shape=box, style=filled, fontname="Helvetica,sans-serif", fontsize=12, height=0.25, margin=0.06'
    lines.append(f"  node [{look}];")
    for key, (_, policy) in TITLES.items():
        lines += cluster(key, dump(policy))
    return "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    path = FOLDER / "block.dot"
    path.write_text(picture())
    subprocess.run(["dot", "-Tsvg", path, "-o", path.with_suffix(".svg")], check=True)
