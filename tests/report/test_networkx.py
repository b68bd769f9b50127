"""``report(model).to_networkx()`` says what the report says; GraphML holds all of it."""

import ast
import io
import re
from collections import Counter
from types import SimpleNamespace

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.report.networkx_graph import digraph
from amp_graph.report.records import NodeReport
from tests.layers import layers
from tests.report.test_report import Broken, Net, Tokens
from tests.test_docs import ROOT, blocks


@layers(
    lambda: dict(
        qkv=nn.Linear(16, 48),
        conv=nn.Conv1d(16, 16, 3, padding=1, groups=2),
        mlp=nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        norm=nn.LayerNorm(16),
    )
)
def Block(self, x):
    """Attention and a convolution, and layers that the backward computes again."""
    q, k, v = self.qkv(x).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, -1)
    x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + self.conv(x.mT).mT
    return self.norm(x + checkpoint(self.mlp, x, use_reentrant=False)) @ x.mT


CASES = {
    "layers": (Net, torch.randn(4, 8), "bf16"),
    "broken": (Broken, torch.randn(4, 8), "bf16"),
    "no floats to lower": (Tokens, torch.arange(6), "bf16"),
    "block": (Block, torch.randn(2, 8, 16), "bf16"),
    "everything full": (Block, torch.randn(2, 8, 16), "bf16,deny=linear|matmul|conv1d|scaled_dot_product_attention"),
}


def read_back(graph):
    """Return a graph as GraphML holds it."""
    held = io.BytesIO()
    nx.write_graphml(graph, held, named_key_ids=True)
    return nx.read_graphml(io.BytesIO(held.getvalue()))


@pytest.fixture(scope="module", params=CASES)
def told(request):
    """The report of a model that was called once."""
    model, x, policy = CASES[request.param]
    torch.manual_seed(0)
    model = amp_graph.convert(model(), policy)
    model(x)
    return amp_graph.report(model)


def test_the_nodes_are_the_reports_rows(told):
    graph = told.to_networkx()
    rows = [(f"{g.index}:{n.name}", g.index, n) for g in told.graphs for n in g.nodes if n.ops]
    called = [n for n, d in graph.nodes.items() if d["kind"] in ("operation", "cast", "part")]
    assert called == [name for name, _, _ in rows]
    for name, index, row in rows:
        node = graph.nodes[name]
        assert (node["graph"], node["number"], node["operation"]) == (index, row.number, ", ".join(row.ops))
        assert (node["precision"], node["class"], node["reason"]) == (row.precision, row.cls, row.reason)
        assert (node["module"], node["line"]) == (row.module, row.line)
        if ";" not in node["dtype"]:
            assert row.type in (f"{node['dtype']}[{node['shape']}]", "")


def test_the_casts_are_marked_on_edges(told):
    graph = told.to_networkx()
    marked = [(d["cast"], d["of"], d["reason"], d["kept"]) for *_, d in graph.edges(data=True) if d]
    assert Counter(marked) == Counter((c.to, c.of, c.reason, c.kept) for g in told.graphs for c in g.casts)
    for source, target, cast in graph.edges(data="cast"):
        if cast:
            assert graph.nodes[source]["dtype"] != cast
            assert cast in graph.nodes[target]["dtype"].split("; ")  # a shared cast also returns what it casts


def test_the_edges_are_what_the_text_shows(told):
    graph = told.to_networkx()
    for one in told.graphs:
        own = [n for n, d in graph.nodes.items() if d["graph"] == one.index and "/" not in d["number"]]
        numbers = {graph.nodes[n]["number"]: n for n in own}
        lines = one.text.partition("\n\nsubgraph")[0].splitlines()
        reads = [line.split(" = ")[-1].partition("  # ")[0] for line in lines]
        wanted = {(source, own[place]) for place, read in enumerate(reads) for source in re.findall(r"%\d+", read)}
        got = {(graph.nodes[a]["number"], b) for a, b in graph.edges if a in own and b in own}
        assert set(numbers) >= {source for source, _ in wanted}
        assert got == wanted


def test_the_bytes_are_the_reports(told):
    graph = told.to_networkx()
    for one in told.graphs:
        found = Counter()
        for name, node in graph.nodes.items():
            of_weight = any(d.get("of") == "weight" for *_, d in graph.in_edges(name, data=True))
            is_copy = node["kind"] == "cast" and of_weight
            if node["graph"] == one.index and node["kind"] in ("operation", "cast") and not is_copy:
                found[node["dtype"]] += node["bytes"]
        assert sum(found.values()) == sum(one.bytes.values())
        if not any(";" in dtype for dtype in found):
            assert dict(+found) == one.bytes


def test_it_has_no_cycle_and_everything_used_leads_to_the_output(told):
    graph = told.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    for name, node in graph.nodes.items():
        if node["kind"] == "weight":
            reached = {graph.nodes[n]["kind"] for n in nx.descendants(graph, name)}
            assert "output" in reached, name


def test_a_body_reads_the_operands_of_the_call_that_runs_it():
    model, x, policy = CASES["block"]
    model = amp_graph.convert(model(), policy)
    model(x)
    graph = amp_graph.report(model).to_networkx()
    inside = [n for n, d in graph.nodes.items() if d["kind"] == "operation" and d["operation"] == "aten.gelu"]
    conv = [n for n, d in graph.nodes.items() if d["operation"] == "aten.conv1d"]
    assert len(inside) == len(conv) == 1
    assert nx.has_path(graph, conv[0], inside[0])


def test_a_step_has_a_graph_with_its_loss():
    model = Net()
    step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), "bf16")
    step(torch.randn(4, 8), torch.randn(4, 8))
    graph = amp_graph.report(step).to_networkx()
    assert [d["precision"] for d in graph.nodes.values() if "aten.mse_loss" in d["operation"]] == ["full"]


def test_a_model_that_was_never_called_has_an_empty_graph():
    graph = amp_graph.report(amp_graph.convert(Net())).to_networkx()
    assert (len(graph), graph.graph["model"]) == (0, "Net")


def test_graphml_holds_all_of_it(told):
    graph = told.to_networkx()
    again = read_back(graph)
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert {(a, b): d for a, b, d in again.edges(data=True)} == {(a, b): d for a, b, d in graph.edges(data=True)}
    assert again.graph.items() >= graph.graph.items()


@pytest.mark.parametrize("text", ["a\fb", "\0", "\ud800", "<&>\"'", "\ufffe", "ü \U0001f600"])
def test_graphml_stays_readable_whatever_a_name_or_a_line_holds(text):
    """A source line with a form feed in it is legal Python, and no XML."""
    row = NodeReport(name=text, number="%0", kind="operation", call=text, ops=(text,), module=text, cls="allow",
                     precision="low", reason=text, origin=text, line=text, type="f32[2]", captured_type="f32[2]",
                     listed=True, bytes=8, flops=0, sources=(text,), text=text)  # fmt: skip
    told = SimpleNamespace(model=text, policy=text, dtype="bf16",
                           graphs=(SimpleNamespace(index=0, nodes=(row,)),))  # fmt: skip
    made = digraph(told)
    again = read_back(made)
    assert dict(again.nodes(data=True)) == dict(made.nodes(data=True))
    assert len(made) == 1


def test_networkx_is_imported_only_where_a_graph_is_made():
    """So that `import amp_graph` and reading a command line do not wait for it."""
    for path in (ROOT / "amp_graph").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert "networkx" not in names, path
            assert not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("networkx")), path


def test_the_docs_example_finds_what_it_says():
    (block,) = blocks(ROOT / "docs" / "internals" / "graph.md", "python")
    found = {}
    exec(compile(block, "docs/internals/graph.md", "exec"), found)
    operation = dict(found["graph"].nodes(data="operation"))
    assert [operation[name] for name in found["chain"] if "." in operation[name][:5]] == [
        "aten.layer_norm",
        "aten.softmax",
    ]
    assert {"aten.layer_norm", "aten.softmax"} <= {operation[name] for name in found["between"]}
    assert {to for _, _, to in found["casts"]} == {"bf16", "f32"}


def test_the_docs_name_every_attribute():
    text = (ROOT / "docs" / "internals" / "graph.md").read_text()
    model = amp_graph.convert(Net(), "bf16")
    model(torch.randn(4, 8))
    graph = amp_graph.report(model).to_networkx()
    of_edges = {key for *_, d in graph.edges(data=True) for key in d}
    assert of_edges == {"cast", "of", "reason", "kept"}
    assert [key for key in {*of_edges, *graph.nodes["0:linear"]} if f"`{key}`" not in text] == []
