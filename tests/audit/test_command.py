"""``amp-graph audit`` as a command: exit statuses, options, exceptions, silenced findings, ranks, one call."""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback

import pytest

import amp_graph
from amp_graph.audit.session import Audit
from amp_graph.cli.main import main
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import ListError
from tests.audit.running import run_script

SCRIPT = """
import sys, torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ABOVE
for step in range(6):
    with torch.autocast("cpu", torch.bfloat16):AT
        x = torch.randn(4, 8)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
    if step == 4 and sys.argv[1:]:
        exec(sys.argv[1])
print("end")
"""
SHORT = """
import sys, torch

model, x, steps, after = torch.nn.Linear(8, 8), torch.randn(4, 8), 0, lambda: None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exec(sys.argv[1] if sys.argv[1:] else "steps = 3")
for _ in range(steps):
    model(x).square().mean().backward()
    optimizer.step()
after()
"""
NOTHING = "amp_graph audit: nothing was looked at: {} ended, and the 2nd and 3rd were to be"
LINE = SCRIPT.splitlines().index('    with torch.autocast("cpu", torch.bfloat16):AT') + 1
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            pass
        return {"out": self.fc(x), "others": [x.long()]}

def build():
    return Net(), torch.randn(2, 8)
"""


def script(at="", above=""):
    return SCRIPT.replace("AT", at).replace("\nABOVE", f"\n{above}" if above else "\n#")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(script())
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    yield tmp_path
    sys.argv, sys.path[:], sys.modules["__main__"] = *kept[:2], kept[2]


def audit(*words):
    """Return the exit status as a process would have it; a script's exceptions are raised."""
    try:
        return main(["audit", *words])
    except SystemExit as end:
        return end.code


def test_a_script_runs_to_its_end_and_the_report_goes_to_stderr(folder, capsys):
    assert audit("train.py") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "end"
    assert "audit" not in printed.out
    assert printed.err.startswith("amp_graph audit: 1 warning; looked at steps 2, 3 of 6\n")
    assert f"train.py:{LINE}: AMP101 warning" in printed.err


def test_the_files_are_written_where_the_command_was_given(folder, capsys):
    (folder / "elsewhere").mkdir()
    assert audit("--json", "a.json", "--report", "a.html", "train.py", "import os; os.chdir('elsewhere')") == 0
    data = json.loads((folder / "a.json").read_text())
    assert [(f["code"], f["file"], f["line"]) for f in data["findings"]] == [("AMP101", "train.py", LINE)]
    assert "AMP101" in (folder / "a.html").read_text()


def test_a_file_that_cannot_be_written_any_more_leaves_the_text_and_the_status(folder, capsys):
    code = "import os; os.mkdir('a.json')"
    assert audit("--json", "a.json", "--fail-on", "warning", "train.py", code) == 1
    told = capsys.readouterr().err
    assert told.index("AMP101") < told.index("amp-graph audit: the report failed: IsADirectoryError")


@pytest.mark.parametrize(("level", "status"), [("note", 1), ("warning", 1), ("error", 0)])
def test_a_level_fails(folder, capsys, level, status):
    assert audit("--fail-on", level, "train.py") == status
    assert capsys.readouterr().out.endswith("end\n")


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit()", 1), ("sys.exit(0)", 1), ("sys.exit(7)", 7), ("sys.exit('why')", "why")]
)
def test_the_scripts_own_status_goes_before_that_of_a_finding(folder, capsys, ending, status):
    assert audit("--fail-on", "warning", "train.py", ending) == status
    assert "AMP101" in capsys.readouterr().err
    assert audit("train.py", ending) in (status, 0, None)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_what_a_script_raises_is_raised_after_the_report(folder, capsys, kind):
    with pytest.raises(kind):
        audit("train.py", f"raise {kind.__name__}")
    told = capsys.readouterr().err
    assert told.index("AMP101") < told.index("Traceback")
    assert "looked at steps 2, 3 of 5" in told


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [
        ([], "steps = 1", 3),
        ([], "steps = 0", 3),
        (["--every", "1"], "steps = 0; x.add_(1)", 3),
        (["--every", "1"], "steps = 1", 0),
        (["--every", "1"], "x @ x.T", 0),
        ([], "steps = 0; sys.exit(7)", 7),
    ],
)
def test_a_run_in_which_nothing_was_looked_at_is_not_clean(folder, capsys, words, code, status):
    (folder / "short.py").write_text(SHORT)
    assert audit(*words, "--fail-on", "error", "short.py", code) == status
    told = capsys.readouterr().err
    assert ("nothing was looked at" in told) == (status != 0)
    assert ("--fail-on has nothing to judge by" in told) == (status != 0)
    assert audit(*words, "short.py", code) == (7 if status == 7 else 0), "without --fail-on"


def test_a_report_that_failed_is_not_clean(folder, capsys, monkeypatch):
    monkeypatch.setattr(Audit, "report", lambda audit: 1 / 0)
    assert audit("--fail-on", "error", "train.py") == 3
    assert "the report failed: ZeroDivisionError" in capsys.readouterr().err


INSIDE = """
import torch
fails = torch.autograd.Function
class Fails(fails):
    @staticmethod
    def forward(ctx, x): return x + 0
    @staticmethod
    def backward(ctx, g): raise ValueError("in backward")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    out = model(torch.randn(2, 4))
    if step == 1:
        import sys
        out = Fails.apply(out) if sys.argv[1] == "backward" else model(torch.randn(2, 5))
    out.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("where", ["backward", "forward"])
def test_a_traceback_of_a_looked_at_step_has_no_frame_of_ours(folder, capsys, monkeypatch, where):
    (folder / "fails.py").write_text(INSIDE)
    monkeypatch.setattr(sys, "argv", ["fails.py", where])
    with pytest.raises((ValueError, RuntimeError)) as raised:
        runpy.run_path(str(folder / "fails.py"), run_name="__main__")
    plain = "".join(traceback.format_exception(raised.value)).splitlines()
    with pytest.raises(raised.type):
        audit("fails.py", where)
    told, _, audited = capsys.readouterr().err.partition("Traceback (most recent call last):\n")
    trace = audited.splitlines()
    theirs = [line for line in trace if '/fails.py", line' in line]
    assert theirs == [line for line in plain if '/fails.py", line' in line] != []
    assert trace[-1] == plain[-1]
    assert [line for line in trace if "/amp_graph/" in line or "eval_frame" in line] == []
    assert "looked at what ran after step 1, the last that ended" in told


def test_ctrl_c_has_the_signal_of_ctrl_c(folder):
    # A shell has what runs in the background ignore the signal.
    handled = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"import os, signal; {handled}; os.kill(os.getpid(), signal.SIGINT)"
    words = [sys.executable, "-m", "amp_graph", "audit", "train.py", code]
    found = subprocess.run(words, capture_output=True, text=True, timeout=100)
    plain = subprocess.run([sys.executable, "train.py", code], capture_output=True, text=True, timeout=100)
    assert found.returncode == plain.returncode != 0
    assert found.stdout == plain.stdout
    assert "AMP101" in found.stderr


def test_steps_end_a_script(folder, capsys):
    assert audit("--steps", "3", "train.py") == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["0", "1"]
    assert "looked at steps 2, 3 of 3" in printed.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--steps", "1"], "steps = 3", NOTHING.format("1 step")),
        ([], "steps = 1", NOTHING.format("1 step")),
        ([], "steps = 0", NOTHING.format("no step")),
        (["--every", "4"], "steps = 1", NOTHING.format("1 step").replace("2nd and 3rd", "2nd, 3rd and each 4th")),
        ([], "steps = 2", "looked at step 2 of 2"),
        ([], "steps = 3", "looked at steps 2, 3 of 3"),
        (["--every", "3"], "steps = 6", "looked at steps 2, 3, 6 of 6"),
        ([], "steps = 1; after = lambda: model(x)", "looked at what ran after step 1, the last that ended"),
        ([], "steps = 2; after = lambda: x @ x.T", "step 2 of 2, and at what ran after step 2, the last that ended"),
        ([], "steps = 2; after = lambda: x.square().mean()", "looked at step 2 of 2"),
        ([], "steps = 1; after = lambda: 1 / 0", NOTHING.format("1 step")),
    ],
)
def test_the_verdict_of_a_short_script_names_the_steps_that_were_seen(folder, capsys, words, code, told):
    (folder / "short.py").write_text(SHORT)
    with pytest.raises(ZeroDivisionError) if "1 / 0" in code else contextlib.nullcontext():
        audit(*words, "short.py", code)
    printed = capsys.readouterr().err
    verdict = " ".join(printed.partition("\n\n")[0].split())
    assert verdict.endswith(told), printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "a SCRIPT, -m MODULE or TARGET is needed"),
        (["none.py"], "audit: cannot run none.py: No such file"),
        (["none.py"], "fix:   amp-graph audit train.py"),
        (["-m", "none.none"], "audit: cannot run module none.none"),
        (["--every", "-1", "train.py"], "every=-1"),
        (["--every", "x", "train.py"], "usage: amp-graph audit"),
        (["--fail-on", "all", "train.py"], "usage: amp-graph audit"),
        (["--steps", "-1", "train.py"], "stop_after=-1"),
        (["--steps", "0", "train.py"], "--steps 0: no step would run"),
        (["--json", "-", "train.py"], "--json -: it cannot be written: stdout is the script's"),
        (["--ignore", "AMP20", "train.py"], "fix:   AMP201,AMP202,"),
        (["--json", "none/a.json", "train.py"], "--json none/a.json: it cannot be written"),
        (["--report", "/", "train.py"], "--report /: it cannot be written"),
        (["--ignore", "AMP999", "train.py"], "there is no code 'AMP999'"),
        (["--ignore", "AMP40", "train.py"], "fix:   AMP40"),
        (["model.py:nothing"], "nothing"),
        (["model.py:build", "--lr", "1"], "--lr 1 after TARGET"),
    ],
)
def test_a_wrong_command_line_is_one_error_before_the_script(folder, capsys, words, told):
    assert audit(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert any(word in printed.err for word in ("\n  fix:", "\n  example:", "usage:"))


# -- silenced -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "above", "silenced"),
    [
        ("  # amp: ignore[AMP101]", "", True),
        ("  # amp: ignore", "", True),
        ("  # amp:ignore[AMP503, AMP101]  # why", "", True),
        ("  # on purpose # amp: ignore[AMP101]", "", True),
        ("  # amp: ignore[]", "", True),
        ("  # amp: ignored", "", False),
        ("  # amp: ignore[AMP101", "", False),
        ("", "# two lines above  # amp: ignore[AMP101]", False),
    ],
)
def test_a_comment_silences_its_line(folder, capsys, at, above, silenced):
    (folder / "train.py").write_text(script(at, above).replace("AMP503", "AMP101"))
    assert audit("--fail-on", "note", "train.py") == int(not silenced)
    assert ("no findings (1 silenced)" in capsys.readouterr().err) is silenced


def test_a_comment_on_a_line_of_its_own_silences_the_next(folder, capsys):
    text = script().replace("    with torch", "    # amp: ignore[AMP101]\n    with torch")
    (folder / "train.py").write_text(text)
    assert audit("--fail-on", "note", "train.py") == 0
    code = text.replace("    # amp: ignore[AMP101]\n", "    y = 1  # amp: ignore[AMP101]\n")
    (folder / "other.py").write_text(code)
    assert audit("--fail-on", "note", "other.py") == 1, "that is a comment of its own line"


@pytest.mark.parametrize("code", ["AMP110", "AMP9", "amp101"])
def test_a_comment_with_an_unknown_code_is_told_at_any_line(folder, capsys, code):
    text = script(f"  # amp: ignore[{code}]").replace("zero_grad()", f"zero_grad()  # amp: ignore[{code}]")
    (folder / "train.py").write_text(text)
    assert audit("--fail-on", "note", "--json", "a.json", "train.py") == 1
    lines = [n for n, line in enumerate(text.splitlines(), start=1) if f"[{code}]" in line]
    assert len(lines) == 2
    told, unseen = " ".join(capsys.readouterr().err.split()), json.loads((folder / "a.json").read_text())["unseen"]
    for line in lines:
        assert f"train.py:{line}: # amp: ignore[{code}]: there is no such code" in told
    assert "".join(told.partition("Not seen: - ")[2].split()).startswith("-".join("".join(u.split()) for u in unseen))
    assert len(unseen) >= 4


@pytest.mark.parametrize("comment", ["# amp: ignore AMP101", "# amp: ignore[AMP101] as it is", "# amp: ignore: AMP101"])
def test_a_comment_of_another_form_silences_nothing_and_says_so(folder, capsys, comment):
    (folder / "train.py").write_text(text := script(f"  {comment}"))
    assert audit("--fail-on", "note", "train.py") == 1
    line = next(n for n, one in enumerate(text.splitlines(), start=1) if comment in one)
    told = " ".join(capsys.readouterr().err.split())
    assert f"train.py:{line}: this comment silences nothing; write # amp: ignore[AMP101]" in told


def test_a_configuration_and_an_option_silence(folder, capsys):
    assert audit("--fail-on", "note", "--ignore", "AMP101", "train.py") == 0
    (folder / "pyproject.toml").write_text('[tool.amp_graph.audit]\nignore = ["AMP101"]\n[tool.other]\nx = 1\n')
    assert audit("--fail-on", "note", "train.py") == 0
    assert run_script(folder / "train.py").report.silenced == 1, "in a program, too"
    (folder / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert audit("--fail-on", "note", "train.py") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[tool.amp_graph.audit]\nignore = ["AMP9"]', "there is no code 'AMP9'"),
        ("[tool.amp_graph.audit]\nignore = [1]", "there is no code '1'"),
        ("[tool.amp_graph.audit]\nignore = [[1]]", "there is no code '[1]'"),
        ('[tool.amp_graph.audit]\nignore = "AMP101"', "legal: a list of codes"),
        ("[tool.amp_graph.audit]\nignores = []", "unknown key 'ignores'"),
        ("[tool", "not TOML"),
    ],
)
def test_a_wrong_configuration_is_one_error(folder, capsys, text, told):
    (folder / "pyproject.toml").write_text(text)
    assert audit("train.py") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    with pytest.raises((AmpGraphError, ListError)):
        amp_graph.audit()


# -- a model, and ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [[], ["--input", "x=f32[3,8]"]])
def test_a_model_is_called_once_with_its_backward(folder, capsys, inputs):
    assert audit("--fail-on", "warning", "--json", "a.json", "model.py:build", *inputs) == 1
    assert capsys.readouterr().err.startswith("amp_graph audit: 1 warning; looked at one call\n")
    data = json.loads((folder / "a.json").read_text())
    assert [(f["file"], f["line"]) for f in data["findings"]] == [("model.py", 10)]
    (row,) = [row for row in data["modules"] if row["module"] == "fc"]
    assert row["backward"]["float32"] >= 1


RANKS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 8)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
del model, optimizer  # or gloo's threads now and then outlive the group
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_is_audited_and_the_first_prints(folder):
    (folder / "ranks.py").write_text(RANKS)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "amp_graph", "audit", "--json", "a.json"]
    found = subprocess.run(
        [sys.executable, *words, "ranks.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("amp_graph audit: 1 warning") == 1
    assert "rank 0 of 2" in found.stderr
    data = json.loads((folder / "a.json").read_text())
    assert [name for name in data["between_ranks"] if name.startswith("allreduce float32")]
