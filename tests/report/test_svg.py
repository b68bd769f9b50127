"""The picture of a report: a box for each module, and no node that only hands a value on."""

import re
import shutil
import subprocess
import xml.etree.ElementTree
from collections import Counter

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphError
from amp_graph.report import graph_svg
from amp_graph.report.graph_svg import cluster_lines


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.add_module('a "quoted\\ name', nn.Linear(16, 4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.get_submodule('a "quoted\\ name')(x)


@pytest.fixture
def told():
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), "bf16")
    model(torch.randn(4, 16)).sum().backward()
    return amp_graph.report(model)


def test_each_module_is_a_cluster_inside_its_parents(told):
    lines = list(cluster_lines(told))
    assert sum('subgraph "cluster_0.layers' in line for line in lines) == 1 + 2 + 4
    assert '  subgraph "cluster_0.layers.1.1" { label="1";' in [f"  {line.strip()}" for line in lines]
    depth = 0
    for line in lines:
        depth += line.endswith(("{", "compound=true;", ";")) and " {" in line
        depth -= line.strip() == "}"
    assert depth == 0
    text = "\n".join(lines)
    assert "weight" not in text
    assert "getitem" not in text
    casts = [cast for cast in told.graphs[0].casts if cast.of == "activation"]
    assert text.count("shape=ellipse") == len({cast.name for cast in casts})


def test_edges_join_all_that_is_shown_along_what_is_left_out(told):
    lines = [line.strip() for line in cluster_lines(told)]
    edges = [tuple(re.findall(r'"0:(\w+)"', line)) for line in lines if " -> " in line]
    shown = {line.partition('"0:')[2].partition('"')[0]: line for line in lines if " [label=" in line}
    assert {name for edge in edges for name in edge} == shown.keys()
    into = Counter(target for _, target in edges)
    assert sorted(into[name] for name, line in shown.items() if '"add' in line) == [2, 2]  # beside and through a layer
    assert all(count == 1 for name, count in into.items() if '"add' not in shown[name])
    (result,) = [name for name, line in shown.items() if '"output"' in line]
    assert result not in {source for source, _ in edges}


@pytest.mark.skipif(shutil.which("dot") is None, reason="dot is missing: apt-get install graphviz")
def test_graphviz_draws_it(told, tmp_path):
    told.svg(tmp_path / "graph.svg")
    tree = xml.etree.ElementTree.parse(tmp_path / "graph.svg")
    assert tree.getroot().tag.endswith("}svg")
    assert 'a "quoted\\ name' in "".join(tree.getroot().itertext())


@pytest.mark.parametrize(
    ("fault", "told_of"),
    [
        (FileNotFoundError(2, "No such file"), r"dot cannot be run: No such file[\s\S]*apt-get install graphviz"),
        (subprocess.TimeoutExpired("dot", 1), "takes more than"),
        (subprocess.CompletedProcess("dot", 1, "", "syntax error"), "dot failed: syntax error"),
    ],
)
def test_without_graphviz_one_error_names_the_package(told, tmp_path, monkeypatch, fault, told_of):
    def run(*args, **kwargs):
        if isinstance(fault, Exception):
            raise fault
        return fault

    monkeypatch.setattr(graph_svg.subprocess, "run", run)
    with pytest.raises(AmpGraphError, match=told_of):
        told.svg(tmp_path / "graph.svg")
    assert not (tmp_path / "graph.svg").exists()
