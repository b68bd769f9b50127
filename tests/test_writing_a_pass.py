"""The page on writing a pass is followed: its file, its row in the table, its test, all run."""

import re
import sys
from pathlib import Path

import pytest
import torch

import amp_graph
from amp_graph import Policy
from amp_graph.passes import pipeline_table
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import TABLE, pipeline
from tests.doc_blocks import module_at
from tests.layers import layers

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "writing-a-pass.md"
PASS, IMPORT, ROW, TEST = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAME = "cancel-transposes"


def made(monkeypatch, folder, name, text):
    """Return ``text`` as the module ``name``."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(text)
    monkeypatch.setitem(sys.modules, name, None)  # which is undone
    return module_at(path, name)


def with_row(behind):
    """Return the text of the table with the two lines of the page in it."""
    text = Path(pipeline_table.__file__).read_text()
    text = text.replace("from amp_graph.passes", f"{IMPORT}from amp_graph.passes", 1)
    row = rf"^    Row\({behind},.*?\n(?=    Row)"
    text, found = re.subn(row, lambda row: f"{row[0]}{ROW}", text, flags=re.M | re.S)
    assert found == 1
    return text


@pytest.fixture
def followed(monkeypatch, tmp_path):
    """The page, followed; returns the table."""
    made(monkeypatch, tmp_path, re.search(r"from (\S+) import", IMPORT)[1], PASS)
    table = made(monkeypatch, tmp_path, "table_of_the_page", with_row("RemoveNoOpDropout")).TABLE
    monkeypatch.setattr(pipeline_table, "TABLE", table)
    return table


def test_the_page_is_as_short_as_it_says():
    assert len(PASS.splitlines()) <= 60
    assert len(TEST.splitlines()) <= 60
    assert len(IMPORT.splitlines()) == len(ROW.splitlines()) == 1


def test_the_row_is_in_the_pipeline(followed):
    (row,) = (row for row in followed if row.name == NAME)
    assert len(followed) == len(TABLE) + 1
    assert row.law.startswith("Replaces ``x.t().t()`` by ``x``")
    names = [one.name for one in pipeline(Phase.CAPTURED, Policy.parse("bf16").pipeline_options("cpu"))]
    assert names.index("remove-no-op-dropout") + 1 == names.index(NAME)
    autocast = Policy.parse("bf16,lists=autocast_cpu").pipeline_options("cpu")
    assert NAME not in [one.name for one in pipeline(Phase.CAPTURED, autocast)]


def test_the_test_of_the_page_passes(followed, monkeypatch, tmp_path):
    module = made(monkeypatch, tmp_path, "test_of_the_page", TEST)
    cases = 0
    for name, function in vars(module).items():
        if name.startswith("test_"):
            marks = getattr(function, "pytestmark", None)
            for given in marks[0].args[1] if marks else [None]:
                function(*([] if given is None else [given]))
                cases += 1
    assert cases == 1 + len(module.CANCELLED) + len(module.KEPT)


def test_the_test_of_the_page_fails_for_a_pass_that_is_wrong(followed, monkeypatch, tmp_path):
    name = re.search(r"from (\S+) import", IMPORT)[1]
    assert "if is_trained(second) != is_trained(x):" in PASS
    made(monkeypatch, tmp_path, name, PASS.replace("if is_trained(second) != is_trained(x):", "if False:"))
    monkeypatch.setattr(
        pipeline_table, "TABLE", made(monkeypatch, tmp_path, "table", with_row("RemoveNoOpDropout")).TABLE
    )
    module = made(monkeypatch, tmp_path, "test_of_the_page", TEST)
    with pytest.raises(AssertionError):
        module.test_no_bit_changes("without gradients")


@layers(lambda: dict(weight=torch.nn.Parameter(torch.randn(8, 8))))
def Twice(self, x):
    """A product with a weight that is transposed twice, the second time by another operation."""
    return x @ self.weight.t().transpose(0, 1)


@pytest.mark.parametrize(("policy", "left"), [("bf16", 0), ("bf16,lists=autocast_cpu", 2)])
def test_a_converted_model_goes_through_the_pass(followed, policy, left):
    model = amp_graph.convert(Twice(), policy)
    model(torch.randn(4, 8)).sum().backward()
    (graph,) = amp_graph.report(model).graphs
    assert len(re.findall(r"= \.t\(|= \.transpose\(", graph.text)) == left
