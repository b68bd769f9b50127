"""The command line: what each command prints, and how each error arrives."""

import json
import os
import re
import subprocess
import sys

import pytest

from amp_graph.cli import main as cli

SOURCE = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 4)
    def forward(self, x):
        print("from the model")
        return self.down(self.up(x).relu())

class Quiet(MLP):
    def forward(self, x):
        return self.down(self.up(x).relu())

class Wrong(MLP):
    def forward(self, x):
        return self.down(x)

class Plain(nn.Module):
    def forward(self, x):
        return x

def build():
    return Quiet(), torch.randn(8, 16)

def broken():
    raise RuntimeError("no weights\\nin this folder")
"""

KEYS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
    def forward(self, x):
        return self.fc(x) + x + 1

def build():
    return nn.Sequential(nn.Linear(16, 16), Block()), torch.randn(8, 16)
"""

GOLDEN = """\
# graph 0: train, with gradients, bf16
%0: f32[32,16] = input up.weight
%1: f32[32] = input up.bias
%2: f32[8,16] = input X
%3: f32[4,32] = input down.weight
%4: f32[4] = input down.bias
%5: bf16[8,16] = .bfloat16(%2)  # up
%6: bf16[32,16] = .bfloat16(%0)  # up
%7: bf16[32] = .bfloat16(%1)  # up
%8: bf16[8,32] = linear(%5, %6, %7)  # up
%9: bf16[8,32] = .relu(%8)
%10: bf16[4,32] = .bfloat16(%3)  # down
%11: bf16[4] = .bfloat16(%4)  # down
%12: bf16[8,4] = linear(%9, %10, %11)  # down
%13: f32[8,4] = .float(%12)
return (%13,)
"""


def dump(amp, *words, name="build"):
    status, out, err = amp("dump", f"FILE:{name}", "--policy", "bf16", *words)
    assert (status, err) == (0, "")
    return out


def test_dump_prints_the_rewritten_graph(amp):
    assert re.sub(r"input (\w+)\n", "input X\n", dump(amp)) == GOLDEN


def test_dump_diff_has_names_for_numbers(amp):
    out = dump(amp, "--diff")
    assert "--- graph as captured\n+++ graph as rewritten\n" in out
    removed = [line for line in out.splitlines() if line.startswith("-%")]
    added = [line for line in out.splitlines() if line.startswith("+%")]
    assert [line.partition(":")[0] for line in removed] == ["-%linear", "-%relu", "-%linear_1"]
    assert {"+%linear", "+%relu", "+%linear_1"} < {line.partition(":")[0] for line in added}
    assert len(added) == 9, "the three, and six casts"
    assert "bf16[" not in dump(amp, "--before")


def test_dump_as_json_report_and_html(amp):
    told = json.loads(dump(amp, "--format", "json"))
    assert [n["ops"] for n in told["graphs"][0]["nodes"] if n["cls"] == "allow"] == [["aten.linear"]] * 2
    assert dump(amp, "--format", "report").startswith("amp_graph report: Quiet\n")
    assert dump(amp, "--format", "html").startswith("<!doctype html>")


def test_an_error_of_the_users_code_is_pythons(amp):
    with pytest.raises(RuntimeError, match="no weights"):
        amp("dump", "FILE:broken")


def test_dump_reasons_stand_behind_each_line(amp):
    lines = dump(amp, "--reasons").splitlines()
    (line,) = [line for line in lines if line.startswith("%8: ")]
    assert "= linear(%5, %6, %7)  # up | low: aten.linear: a matrix product" in line


def test_dump_writes_to_a_file(amp, tmp_path):
    assert dump(amp, "--output", str(tmp_path / "out.txt")) == ""
    assert (tmp_path / "out.txt").read_text().startswith("# graph 0: ")


def test_dump_eval_and_inputs(amp):
    out = dump(amp, "--eval", "--input", "x=f32[3,16]", name="Quiet")
    assert out.startswith("# graph 0: eval, with gradients, bf16\n")
    assert "f32[3,16] = input" in out


def test_what_the_model_prints_stays_out_of_the_output(amp):
    status, out, err = amp("dump", "FILE:MLP", "--input", "f32[8,16]", "--format", "json")
    assert status == 0
    assert err == "from the model\n"
    assert json.loads(out)["model"] == "MLP"


def test_explain_tells_all_of_a_node(amp, file):
    line = SOURCE.splitlines().index("class Quiet(MLP):") + 3
    for name in ("%8", "0:%8", "up"):
        status, out, err = amp("explain", "FILE:build", name, "--policy", "bf16")
        assert (status, err) == (0, "")
        for wanted in (
            "(%8) in graph 0 (train, bf16-O1)",
            "operation  aten.linear",
            "module     up",
            f"line       {file}:{line}, in forward: return self.down(self.up(x).relu())",
            "class      allow",
            "precision  low",
            "reason     aten.linear: a matrix product",
            "value      bf16[8,32], as captured f32[8,32]",
            "list entry",
            "from    common.toml:",
            "source  Micikevicius",
            "%6 bfloat16_1: bf16[32,16], cast from up.weight (%0: f32[32,16])",
            "read by    %9 relu: bf16[8,32]",
        ):
            assert wanted in out, wanted


def test_explain_takes_an_input_or_an_operation(amp):
    _, out, _ = amp("explain", "FILE:build", "up.weight")
    assert "input      up.weight: f32[32,16]" in out
    assert "a cast: " in out
    _, out, _ = amp("explain", "FILE:build", "linear")
    assert out.count("operation  aten.linear") >= 1


def test_explain_takes_the_key_that_keep_ops_takes(amp, tmp_path):
    """``1:add.1`` is in the module of that name; a graph's number may stand before it."""
    path = tmp_path / "keys.py"
    path.write_text(KEYS)
    keys = ("0:linear", "1:add", "1:add.1", "1.fc:linear")
    for key in keys:
        for name in (key, f"0:{key}"):
            status, out, err = amp("explain", f"{path}:build", name, "--policy", f"bf16,keep_ops={key}")
            assert (status, err) == (0, "")
            assert f"  key        {key}\n" in out
            assert f"kept by keep_ops ({key})" in out
            assert out.count("  operation  ") == 1
    _, out, _ = amp("explain", f"{path}:build", keys[2], "--policy", f"bf16,keep_ops={keys[1]}")
    assert "kept by keep_ops" not in out
    _, out, _ = amp("explain", f"{path}:build", "0:aten.add", "--policy", "bf16")
    assert out.count("  operation  aten.add\n") == 2


def test_lists_shows_one_operation_or_all(amp):
    status, out, _ = amp("lists", "gelu", "--policy", "fp16,deny=gelu", "--device", "cpu")
    assert status == 0
    assert out == (
        "# fp16_cpu (float16 on cpu), policy fp16-O1,deny=gelu\naten.gelu: deny\n"
        "  why     you asked for it: deny='gelu'\n  from    argument deny=\n"
    )
    _, out, _ = amp("lists", "aten::pow", "--policy", "bf16", "--device", "cuda")
    assert "when    exponent is 1 or 2 or 3 or 4" in out
    assert "from    bf16.toml:" in out
    _, out, _ = amp("lists", "--device", "cpu")
    assert re.search(r"^aten\.linear +allow +always +a matrix product", out, re.M)


def test_lists_says_what_happens_to_an_operation_that_no_list_names(amp):
    for policy, wanted in (
        ("bf16", "it runs exactly as captured"),
        ("bf16,lists=autocast_cpu", "precision of its inputs"),
    ):
        status, out, _ = amp("lists", "frexp", "--policy", policy, "--device", "cpu")
        assert status == 0
        assert wanted in out


# (words, exit status, what stderr holds)
ERRORS = {
    "unknown node": (
        ["explain", "FILE:build", "linaer"],
        1,
        ["no node 'linaer'", "did you mean ", "linear", "fix:"],
    ),
    "unknown op": (
        ["lists", "gelo"],
        1,
        ["unknown operator aten.gelo", "legal:", "aten.gelu"],
    ),
    "bad policy": (["dump", "FILE:build", "--policy", "fp23"], 1, ["unknown word 'fp23'", "legal:", "fp16"]),
    "level O0": (["dump", "FILE:build", "--policy", "O0"], 1, ["under policy auto-O0", "--policy bf16"]),
    "bad target": (["dump", "FILE"], 1, ["no ':' before a name", "^", "legal:", "example:"]),
    "bad spec": (["dump", "FILE:Quiet", "--input", "x=f31[8]"], 1, ["no input can be read here", "^", "legal:"]),
    "no inputs": (["dump", "FILE:Quiet"], 1, ["missing a required argument: 'x'", "example:"]),
    "format": (
        ["dump", "FILE:build", "--diff", "--format", "html"],
        1,
        ["--diff needs --format text", "fix:"],
    ),
    "output": (["dump", "FILE:build", "--output", "FILE/x"], 1, ["cannot write", "legal:", "fix:"]),
    "nothing captured": (
        ["dump", "FILE:Plain", "--input", "f32[2]"],
        1,
        ["nothing was captured of Plain", "fix:"],
    ),
    "no command": ([], 2, ["usage: amp-graph", "COMMAND"]),
    "unknown command": (["dmup"], 2, ["invalid choice: 'dmup'"]),
    "unknown format": (["dump", "FILE:build", "--format", "svg"], 2, ["invalid choice: 'svg'", "text"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_screen_on_stderr(amp, case):
    words, status, wanted = ERRORS[case]
    got, out, err = amp(*words)
    assert (got, out) == (status, "")
    for word in wanted:
        assert word in err
    assert len(err.splitlines()) <= 24
    assert "Traceback" not in err


def test_help_and_version_return_zero(amp):
    assert amp("--version")[1].startswith("amp-graph ")
    for words in ([], ["dump"], ["explain"], ["lists"]):
        status, out, _ = amp(*words, "--help")
        assert status == 0
        assert out.startswith("usage: amp-graph")


def test_the_module_runs_and_reading_the_command_line_needs_no_torch():
    """Leaves the package's own ``__init__`` out: asked here is what the command line itself imports."""
    script = (
        "import sys, types\n"
        "package = types.ModuleType('amp_graph'); package.__path__ = [sys.argv.pop(1)]\n"
        "sys.modules['amp_graph'] = package\n"
        "from amp_graph.cli.main import main\n"
        "status = main(['dump', '--help'])\n"
        "sys.exit(status or not {'torch', 'networkx'}.isdisjoint(sys.modules))\n"
    )
    folder = os.path.dirname(os.path.dirname(cli.__file__))
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [sys.executable, "-m", "amp_graph", "lists", "gelu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "aten.gelu: " in done.stdout
