"""Every block of code on every page runs as it is given, or the page says why not."""

import os
import re
import shlex
import subprocess
import sys
import webbrowser

import pytest
import torch

from amp_graph.cli.main import main, parser
from amp_graph.lists import load
from tests.doc_blocks import MODEL, PAGES, PROGRAMS, ROOT, Block, blocks_of, chains, given, run_blocks
from tests.warned import without_warnings

LANGUAGES = {"", "console", "python", "sh", "text", "toml"}
# Pages whose Python runs in a test of its own, which has more to say of it.
PYTHON_ELSEWHERE = {
    "docs/audit.md": "tests/audit/test_audit_page.py",
    "docs/internals/audit-codes.md": "tests/audit/test_codes.py",
    "docs/internals/graph.md": "tests/report/test_networkx.py",
    "docs/internals/loss-scaling.md": "tests/test_docs.py",
    "docs/run.md": "tests/run/test_run_page.py",
    "docs/trainers.md": "tests/integrations/test_docs_of_trainers.py",
    "docs/internals/writing-a-pass.md": "tests/test_writing_a_pass.py",
}
# Commands that take long, or write outside of the folder: they are read here, and run by tests of their own.
COMMANDS_ELSEWHERE = {
    "audit": "tests/audit/test_audit_page.py",
    "calibrate": "tests/cli/test_calibrate.py",
    "run": "tests/run/test_run_page.py",
}
# Pages whose Python changes the process for good.
OF_ITS_OWN_PROCESS = {"docs/internals/memory.md"}
MOST_NOT_RUN = 8  # all pages together
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [
    block
    for block in BLOCKS
    if block.language == "python" and block.page not in PYTHON_ELSEWHERE and not block.why_not_run and not block.needs
]
COMMANDS = [(block, line) for block in BLOCKS if not block.why_not_run for line in block.commands]
FOR_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def words_of(line):
    """Return the words of a command line, without variables of the environment."""
    words = shlex.split(line, comments=True)
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


def status_of(words):
    try:
        return main(words)
    except SystemExit as end:  # --version
        return end.code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the pages speak of; nothing opens a browser."""
    (tmp_path / "model.py").write_text(MODEL)
    torch.save(given()["batches"][0], tmp_path / "batch.pt")
    (script,) = [block for block in BLOCKS if block.page == "docs/run.md" and block.language == "python"]
    (tmp_path / "train.py").write_text(script.code)
    monkeypatch.chdir(tmp_path)
    for name, value in FOR_ONE.items():
        monkeypatch.setenv(name, value)
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    yield opened
    if torch.distributed.is_initialized():  # a block failed before its end
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("blocks", chains(PYTHON), ids=lambda blocks: blocks[0].name)
def test_python_runs(blocks, folder, capsys):
    if blocks[0].page in OF_ITS_OWN_PROCESS:
        (block,) = blocks
        code = f"from tests.doc_blocks import given\nglobals().update(given())\n{block.code}"
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=200
        )
        return
    with without_warnings():
        run_blocks(blocks, given())


def test_the_quick_start_is_five_lines_and_opens_the_report(folder, tmp_path, capsys):
    block = next(block for block in BLOCKS if block.page == "docs/quick-start.md" and block.language == "python")
    assert len(re.findall(r"^.", block.code, re.MULTILINE)) == 5
    run_blocks([block], {})  # nothing is given
    assert folder == [(tmp_path / "report.html").as_uri()]
    assert "linear" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=[f"{block.name} {line[:40]}" for block, line in COMMANDS])
def test_commands_run(block, line, folder, capsys):
    words = words_of(line)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[0] == "amp-graph" and words[1] in COMMANDS_ELSEWHERE:
        parser().parse_known_args(words[1:])
    elif words[0] == "amp-graph":
        if "onnx" in words:
            pytest.importorskip("onnxscript", reason="pip install onnx onnxscript onnxruntime")
        assert status_of(words[1:]) == 0
    elif words[1] == "-c":
        exec(words[2], {})
    else:
        assert words[0] in ("pip", "python")
        assert words[1] == "install" or (ROOT / words[1]).exists() or os.path.exists(words[1])


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: block.name)
def test_lists_load(block, tmp_path):
    (tmp_path / "list.toml").write_text(block.code)
    for dtype in ("bfloat16", "float16"):
        assert load(str(tmp_path / "list.toml"), dtype=dtype, device="cpu").name in block.code


@pytest.mark.parametrize("page", {**PYTHON_ELSEWHERE, **COMMANDS_ELSEWHERE})
def test_what_runs_elsewhere_is_run_there(page):
    test = ROOT / {**PYTHON_ELSEWHERE, **COMMANDS_ELSEWHERE}[page]
    assert page.rpartition("/")[2].removesuffix(".md") in test.read_text()


def test_what_is_not_run_says_why_and_is_little():
    left = [block for block in BLOCKS if block.why_not_run]
    assert len(left) <= MOST_NOT_RUN
    assert [block.name for block in left if len(block.why_not_run.split()) < 3] == []


def test_packages_that_blocks_need_are_tested_where_they_are_installed():
    needed = {name for block in BLOCKS for name in block.needs}
    assert needed <= set(re.findall(r"\w+", (ROOT / "tests/integrations/test_docs_of_trainers.py").read_text()))


def test_languages_are_known():
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert not [block.name for block in BLOCKS if block.mark == "continues" and block.language != "python"]


def test_no_block_is_overlooked():
    for page in PAGES:
        found = len(re.findall(r"^```\w", page.read_text(), re.MULTILINE))
        assert found == len([block for block in blocks_of(page) if block.language]), page


def test_a_block_that_fails_shows_the_line_of_its_page():
    block = Block("docs/none.md", 7, "python", "x = 1\n1 / 0\n", "")
    with pytest.raises(ZeroDivisionError) as found:
        run_blocks([block], {})
    assert (str(found.traceback[-1].path).rpartition("docs/")[2], found.traceback[-1].lineno + 1) == ("none.md", 8)


def test_marks_and_commands_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.doc_blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: it needs a GPU -->\n```python\na\n```\n\n```python\nb\n```\n\n"
        "<!-- continues -->\n\n```python\nc\n```\n"
        '```\nA=1 amp-graph dump x --input "a b" | dot\nplain\n```\n'
    )
    blocks = blocks_of(page)
    assert [len(run) for run in chains(blocks)] == [1, 2, 1]
    assert blocks[0].why_not_run == "it needs a GPU"
    assert [words_of(line) for line in blocks[3].commands] == [["amp-graph", "dump", "x", "--input", "a b"]]
    assert PROGRAMS.match("plain amp-graph ") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "printed"), [("DDP(", "amp_graph report: Sequential"), ("fully_shard(", "5 gathers a step")]
)
def test_the_scripts_for_many_processes_run_in_two(tmp_path, wrapper, printed):
    page = [run for run in chains(PYTHON) if run[0].page == "docs/training.md" and "init_process" in run[0].code]
    (script,) = [run for run in page if wrapper in run[0].code]
    (tmp_path / "train.py").write_text("".join(block.code for block in script))
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count(printed) == 1
