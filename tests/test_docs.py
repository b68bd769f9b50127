"""What the documentation shows is true: its lists load, its policies parse, its links lead somewhere."""

import dataclasses
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import torch

import amp_graph
from amp_graph import Policy

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Phrases of an older language of this project. The field has words for them; docs/internals/glossary.md lists those.
IDIOM = (
    r"what pays|(?:does|do|did) not pay|nothing pays|neither pays|it pays|lay gradients|own products?"
    r"|stands? aside|standing aside|comput\w+ (?:\w+ )?again|pieces|once an update|(?:is|are) turned|as ever"
)


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def prose(text):
    """Return a page's text without code, which may be named as it likes, and with every gap one space."""
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def anchors(text):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(page, text):
    """Return the relative links in ``text`` that lead to no file, or to no heading of it."""
    found = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        is_page = target.suffix == ".md" and target.exists()
        missing = anchor and is_page and anchor not in anchors(text if target == page else target.read_text())
        if not link.startswith("http") and (not target.exists() or missing):
            found.append(link)
    return found


def dead_paths(text):
    """Return the files of the repository that ``text`` names and that are not there."""
    found = re.findall(r"`(?:python )?((?:amp_graph|benchmarks|docs|examples|lists|passes|tests)/[\w/.-]+)", text)
    return [path for path in found if not (ROOT / re.sub("^amp_graph/(passes|lists)/", r"\1/", path)).exists()]


def idiom(text):
    return re.findall(rf"\b(?:{IDIOM})\b", prose(text), re.IGNORECASE)


def unknown_names(text):
    """Return the names of amp_graph that ``text`` has and the package does not; trainers' packages may be missing."""
    text = re.sub(r"<!--.*?-->|\S+\.md\b|amp_graph\.integrations\.\w+(?:\.\w+)?", "", text, flags=re.DOTALL)
    return [name for name in sorted(set(re.findall(r"\bamp_graph(?:\.[A-Za-z_]\w*)+", text))) if not is_known(name)]


def is_known(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def linked(page):
    targets = (link.partition("#")[0] for link in LINK.findall(page.read_text()))
    return {(page.parent / t).resolve() for t in targets if t and not t.startswith("http")}


def test_the_docs_name_every_word_of_a_policy():
    text = (ROOT / "docs" / "policy.md").read_text()
    assert [f.name for f in dataclasses.fields(Policy) if f"`{f.name}=" not in text] == ["dtype", "level"]


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_policies_of_pages_parse(page):
    """Those in prose and tables, and those of code, which need not run."""
    for text in re.findall(r'(?:`|convert\(model, )"((?:bf16|fp16|auto)[^"`]*)"', page.read_text()):
        Policy.parse(text.replace("\\|", "|").replace("mine.toml", "default"))


# What is looked for on each page, a text that has it, and what is found there.
CHECKS = {
    "unknown names": (
        lambda page, text: unknown_names(text),
        "`amp_graph.convert`, amp_graph.freeze, amp_graph.passes.base, amp_graph.none, amp_graph.report.no",
        ["amp_graph.none", "amp_graph.report.no"],
    ),
    "dead links": (
        dead_links,
        "# A page\n[a](lists.md) [b](#a-page) [c](none.md) [d](#none) [e](lists.md#none) [f](https://x.org/y.md)",
        ["none.md", "#none", "lists.md#none"],
    ),
    "files that are not there": (
        lambda page, text: dead_paths(text),
        "`passes/base.py`, `amp_graph/passes/base.py`, `python docs/generate.py`, `passes/none.py`, passes/none.py",
        ["passes/none.py"],
    ),
    "words of our own": (
        lambda page, text: idiom(text),
        "It stands\naside. On a CPU it does not pay.\n\n`own products` is code.\nBackward computes it again."
        " A lawn in a piece; the payload is returned; low precision is profitable; recompute it.",
        ["stands aside", "does not pay", "computes it again"],
    ),
}
# What writing-a-pass.md has its reader write.
NEW = r"(amp_graph\.passes\.recognize\.|.*/(test_)?)cancel_transposes(\.py)?"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_none(page, check):
    found = CHECKS[check][0](page, page.read_text())
    assert [one for one in found if page.name != "writing-a-pass.md" or not re.fullmatch(NEW, one)] == []


@pytest.mark.parametrize("check", CHECKS)
def test_control_they_are_found(check):
    look, text, expected = CHECKS[check]
    assert look(ROOT / "docs" / "policy.md", text) == expected


def test_the_passes_over_a_graph_of_the_users_own_run():
    (code,) = [
        block for block in blocks(ROOT / "docs" / "internals" / "loss-scaling.md", "python") if "ScaleLoss" in block
    ]
    found = {}
    exec(compile(code, "docs/internals/loss-scaling.md", "exec"), found)
    expected = torch.autograd.grad(
        torch.nn.functional.linear(found["x"], found["weight"]).square().mean(), found["weight"]
    )
    assert torch.equal(found["gradient"], expected[0])
    assert found["found_inf"] == 0
    assert found["counts"][0] == 0, "the scale grew, and good steps are counted anew"


def test_an_overflow_is_debugged_as_the_page_shows(tmp_path, capsys):
    page = ROOT / "docs" / "numerics.md"
    path = tmp_path / "model.py"
    path.write_text("\n".join(blocks(page, "python")[:2]))  # the others take a model as given
    found = runpy.run_path(str(path))
    assert found["found"].text() in capsys.readouterr().out
    shown = next(block for block in page.read_text().split("```") if "  operands" in block)
    assert found["found"].text().replace(str(path), "model.py") == shown.removeprefix("text\n")
    assert found["cause"].line.endswith("* 1e5)")
    assert found["last"] == {"step": 1, "scale": 2.0**16, "skipped": True}


def test_the_report_in_the_readme_is_what_its_code_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    (code,) = [block for block in blocks(page, "python") if "class Block" in block]
    exec(code, {"torch": torch, "amp_graph": amp_graph})
    printed = capsys.readouterr().out.splitlines()
    (shown,) = blocks(page, "text")
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_the_guide_is_at_most_ten_pages():
    nav = (ROOT / "mkdocs.yml").read_text().partition("- Guide:")[2].partition("- Internals:")[0]
    guide = re.findall(r"- (\S+\.md)$", nav, re.MULTILINE)
    assert len(guide) <= 10
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == {"README.md", *guide}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_picture_is_what_the_tool_draws():
    found = runpy.run_path(str(ROOT / "docs" / "images" / "draw_block.py"))
    assert found["picture"]() == (ROOT / "docs" / "images" / "block.dot").read_text(), "docs/images/draw_block.py"


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    assert [name_of(page) for page in DOCS[1:] if page != index and page not in linked(index)] == []
