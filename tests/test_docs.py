"""What the documentation shows is true: its lists load, its policies parse, its links lead somewhere."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from amp_graph import Policy
from amp_graph.lists import load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS = [page for page in PAGES if page.parent.name == "docs" or page.name == "README.md"]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_list_in_the_docs_loads(tmp_path):
    (text,) = blocks(ROOT / "docs" / "lists.md", "toml")
    (tmp_path / "mine.toml").write_text(text)
    assert load(str(tmp_path / "mine.toml"), dtype="bfloat16", device="cpu").name == "mine"


def test_the_docs_name_every_word_of_a_policy():
    text = (ROOT / "docs" / "policy.md").read_text()
    assert [f.name for f in dataclasses.fields(Policy) if f"`{f.name}=" not in text] == ["dtype", "level"]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_policies_in_python_examples_parse(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
        for text in re.findall(r'convert\(model, "([^"]+)"', block):
            Policy.parse(text.replace("mine.toml", "default"))


def test_the_passes_over_a_graph_of_the_users_own_run():
    (code,) = [block for block in blocks(ROOT / "docs" / "training.md", "python") if "ScaleLoss" in block]
    found = {}
    exec(compile(code, "docs/training.md", "exec"), found)
    expected = torch.autograd.grad(
        torch.nn.functional.linear(found["x"], found["weight"]).square().mean(), found["weight"]
    )
    assert torch.equal(found["gradient"], expected[0])
    assert found["found_inf"] == 0
    assert found["counts"][0] == 0, "the scale grew, and good steps are counted anew"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
