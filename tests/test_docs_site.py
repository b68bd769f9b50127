"""The site: every public name is in the API reference, and says what it takes and raises; the hooks; the pictures."""

import dataclasses
import importlib
import inspect
import re
import runpy
from types import SimpleNamespace

import pytest
import torch

import amp_graph
from tests.doc_blocks import ROOT

DOCS = ROOT / "docs"
API = {page.stem: page.read_text() for page in (DOCS / "api").glob("*.md")}
SHOWN = re.findall(r"^<!-- api: (\S+) -->$", "\n".join(API.values()), re.MULTILINE)
HOOKS = runpy.run_path(str(DOCS / "site_hooks.py"))
TAKES_ANY = {"self", "args", "kwargs", "unused", "params"}
# Methods that hand on to torch's, whose names say all.
AS_TORCHS = re.compile(r"register_\w+|load_state_dict|on_\w+|from_dict|pipeline_options")


def page(uri):
    """Return a page of the site, as mkdocs gives it to hooks."""
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})


def found(path):
    """Return the object of ``amp_graph.scaling.grad_scaler.GradScaler``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def callables():
    """Yield every function, class and method of the reference, with the words that describe it."""
    for path in SHOWN:
        if ".integrations." in path:  # their packages may be missing
            continue
        thing, told = found(path), inspect.getdoc(found(path)) or ""
        yield path, thing, told
        if inspect.isclass(thing) and not issubclass(thing, torch.optim.Optimizer):
            for name, method in vars(thing).items():
                function = getattr(method, "__func__", method)
                if inspect.isfunction(function) and (name == "__call__" or name[0] != "_"):
                    yield f"{path}.{name}", function, inspect.getdoc(function) or ""


CALLABLES = list(callables())


def test_every_public_name_is_in_the_reference():
    names = {path.rpartition(".")[2] for path in SHOWN} | {"AmpGraphError"}
    assert not set(amp_graph.__all__) - names
    assert not {"metrics", "export", "to_onnx"} - names
    assert {"AmpGraphPrecision", "AmpGraphMetrics", "AmpGraphCallback", "prepare"} <= names


def test_every_error_is_in_the_reference():
    errors = importlib.import_module("amp_graph.errors")
    names = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert {name for name in names if f"`{name}`" not in API["amp_graph"]} == set()


@pytest.mark.parametrize(("path", "thing", "told"), CALLABLES, ids=[path for path, _, _ in CALLABLES])
def test_docstrings_name_every_parameter_and_error(path, thing, told):
    assert told
    if AS_TORCHS.fullmatch(path.rpartition(".")[2]) or (
        inspect.isclass(thing) and issubclass(thing, torch.optim.Optimizer)
    ):
        return
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing):  # a field may say itself what it is for
        told = "\n".join([told, *(said_on_its_page(f) for f in dataclasses.fields(thing) if "doc" in f.metadata)])
    parameters = set(inspect.signature(thing).parameters) - TAKES_ANY
    assert [name for name in parameters if not re.search(rf"\b{name}\b", told)] == []
    if inspect.isfunction(thing) and re.search(r"\braise \w+Error\b", inspect.getsource(thing)):
        assert "raise" in told.lower()


def said_on_its_page(field):
    """Return the row of a field of ``Policy`` on the page to which the reference leads; "" without all that it says."""
    said = field.metadata["doc"].replace("|", "\\|")
    rows = re.findall(rf"^\| `?{field.name}=?`? \| .*$", (DOCS / "policy.md").read_text(), re.MULTILINE)
    return next((row for row in rows if said and row.endswith(f" | {said} |")), "")


def test_links_out_of_docs_lead_to_pages_of_the_site():
    text = "[a](../../amp_graph/freeze.py) [b](../memory.md#x) `[c](../../README.md)` [`d`](../../examples)"
    moved = HOOKS["on_page_markdown"](text, page("api/memory.md"))
    assert moved == (
        "[a](../repository/amp_graph/freeze.py.md) [b](../memory.md#x) `[c](../../README.md)` "
        "[`d`](../repository/examples.md)"
    )


def test_markdown_that_is_not_understood_is_found(caplog):
    shown = HOOKS["on_page_content"](
        "<p>a <code>b ** c</code> **d** `e</p>\n<td><code>x\\|y</code></td><code>\\|</code>", page("page.md")
    )
    assert [record.args for record in caplog.records] == [("page.md", "<p>a  **d** `e</p>\n<td></td>")] * 2
    assert shown.endswith("<td><code>x|y</code></td><code>\\|</code>")


def test_the_search_works_from_a_folder_without_a_network(caplog):
    options = (ROOT / "mkdocs.yml").read_text()
    assert "- offline" in options
    (script,) = re.findall(r"polyfills: \[(\S*iframe-worker\S*)\]", options)
    assert (DOCS / script).exists()
    tags = [f'<script src="{script}">', "<script src=https://x.org/shim>", '<a href="https://x.org">']
    assert HOOKS["on_post_page"]("\n".join(tags), page("page.md")) == "\n".join(tags)
    assert [record.args for record in caplog.records] == [("page.md", tags[1])]


def test_parameters_are_read_out_of_docstrings():
    pytest.importorskip("griffe", reason="pip install griffelib")
    sectioned = runpy.run_path(str(DOCS / "griffe_parameters.py"))["sectioned"]
    text = "Does it.\n\na: one,\nover two lines. b, c (x): two; d: three. Raises E if not.\n\nother: no parameter."
    assert sectioned(text, {"a", "b", "c", "d"}) == (
        "Does it.\n\n**Raises** E if not.\n\nother: no parameter.\n\nArgs:\n"
        "    a: one, over two lines.\n    b: two;\n    c: two;\n    d: three."
    )
    assert sectioned("Nothing: here.", {"a"}) == "Nothing: here."


def test_the_pictures_are_what_the_script_draws():
    for name, draw in runpy.run_path(str(DOCS / "images" / "draw_concepts.py"))["PICTURES"].items():
        assert draw() == (DOCS / "images" / f"{name}.svg").read_text(), f"{name}: python docs/images/draw_concepts.py"


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {page for page in pages if not re.search(rf"[ ]{re.escape(page)}$", nav, re.MULTILINE)} == set()
