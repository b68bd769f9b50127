"""`amp-graph search --script`: the steps of unmodified scripts give the gradients that the scripts themselves get."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from amp_graph.cli.main import main
from amp_graph.cli.script_steps import STEPS, first_steps
from amp_graph.errors import AmpGraphError
from amp_graph.policy import Policy
from amp_graph.run.script import execute, script_target
from tests.search.made_up_times import low_takes

HEAD = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x, y=None):
        self.features = self.norm(self.body(x)).relu()  # kept by the model, with a history
        out = self.head(self.features)
        return out if y is None else {"loss": F.cross_entropy(out, y), "out": out}

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(int(sys.argv[1]))]
torch.manual_seed(1)
"""
STYLES = {
    "a criterion": """
criterion = nn.CrossEntropyLoss()
for x, y in batches:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
""",
    "targets made from the outputs, and a penalty of weights": """
for x, y in batches:
    optimizer.zero_grad()
    out = model(x)
    labels = y.clone()
    labels[:2] = out.argmax(-1)[:2]
    penalty = sum(p.square().sum() for p in model.parameters())
    loss = F.cross_entropy(out, labels) + 1e-2 * penalty
    loss.backward()
    print(loss.item(), out.std())
    optimizer.step()
""",
    "a loss that the model returns": """
for x, y in batches:
    optimizer.zero_grad()
    model(x, y=y)["loss"].backward()
    optimizer.step()
""",
    "two calls, one of which depends on the other": """
for x, y in batches:
    optimizer.zero_grad()
    out = model(x)
    (out - model(x + F.pad(out, (0, 4)))).square().mean().backward()
    optimizer.step()
""",
    "autocast and a scaler": """
scaler = torch.amp.GradScaler("cpu")
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    (loss if len(batches) == 3 else scaler.scale(loss)).backward()
    if len(batches) != 3:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
    "a closure": """
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), F.one_hot(y, 4).float())
    loss.backward()
    return loss
for x, y in batches:
    optimizer.step(closure)
""",
    "a given gradient": """
for x, y in batches:
    optimizer.zero_grad()
    out = model(x)
    out.backward(torch.ones_like(out) / y.numel())
    optimizer.step()
""",
    "a frozen network in the loss, and a teacher": """
vision = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
teacher = Net()
for x, y in batches:
    optimizer.zero_grad()
    out = model(x)
    with torch.no_grad():
        wanted = teacher(x)
    F.mse_loss(vision(out), vision(wanted)).backward()
    optimizer.step()
""",
    "a batch in a buffer that the next one overwrites": """
static = torch.empty(6, 8)
for x, y in batches:
    static.copy_(x)
    optimizer.zero_grad()
    F.cross_entropy(model(static), y).backward()
    optimizer.step()
""",
}


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def written(folder, text):
    path = folder / "train_for_search.py"
    path.write_text(text)
    return str(path)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", STYLES)
def test_the_last_step_has_the_gradients_of_the_script(tmp_path, name):
    path = written(tmp_path, HEAD + STYLES[name])
    execute(script_target(path), [str(STEPS)])  # as it is: it ends with the gradients of its last step
    expected = gradients(sys.modules["__main__"].model)
    plain = torch.Tensor.backward, torch.autograd.backward, nn.Module.__call__, torch.save, torch.amp.GradScaler.scale
    found = first_steps(script_target(path), ["9"], Policy())
    now = torch.Tensor.backward, torch.autograd.backward, nn.Module.__call__, torch.save, torch.amp.GradScaler.scale
    assert now == plain
    assert len(found.steps) == STEPS
    for _ in range(2):  # the second time from what the first one left
        model = copy.deepcopy(found.model)
        found.steps[-1](model, as_written=True).backward()
        assert all(torch.equal(g, expected[name]) for name, g in gradients(model).items())
    found.steps[-2](model).backward()
    assert not torch.equal(gradients(model)["head.weight"], expected["head.weight"])  # the control: another batch


WRONG = {
    "no backward": ("model(batches[0][0])", r"train_for_search.py ended, and no loss.backward\(\) was seen"),
    "autograd.grad": (
        "torch.autograd.grad(model(batches[0][0]).sum(), model.head.weight)", r"no loss.backward\(\) was seen",
    ),
    "two models": (
        "other = Net(); (model(batches[0][0]) - other(batches[0][0])).sum().backward()",
        r"train_for_search.py:\d+: the loss comes of 2 models, Net and Net",
    ),
    "two backwards of a call": (
        "out = model(batches[0][0]); out.sum().backward(retain_graph=True); out.mean().backward()",
        "from no call of a model since the last backward",
    ),
    "a loss that draws numbers between others": (
        "torch.manual_seed(1); out = model(batches[0][0]); torch.rand(3).tolist(); "
        "(out * torch.manual_seed(2) if 0 else out * torch.rand(4)).sum().backward()",
        "when its functions are called again",
    ),
    "a function of its own": (
        """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

Double.apply(model(batches[0][0])).sum().backward()
""",
        "a custom autograd function",
    ),
    "autocast of the model": (
        """
class Inner(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)

Inner()(batches[0][0]).sum().backward()
""",
        "Inner uses torch.autocast in its own forward",
    ),
    "a compiled model": (
        "torch.compile(model, backend='eager')(batches[0][0]).sum().backward()", "is compiled by the script",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_taken_is_one_error(tmp_path, name):
    body, told = WRONG[name]
    with pytest.raises(AmpGraphError, match=told) as raised:
        first_steps(script_target(written(tmp_path, HEAD + body)), ["3"], Policy())
    assert "fix:" in str(raised.value)


def test_one_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AmpGraphError, match="one of several processes"):
        first_steps(script_target(written(tmp_path, "1 / 0")), [], Policy())


def test_the_script_ends_without_a_checkpoint_and_with_its_cleanup(tmp_path):
    text = f"""
try:
    {STYLES["a criterion"].strip().replace(chr(10), chr(10) + "    ")}
finally:
    try:
        torch.save(model.state_dict(), {str(tmp_path / "last.pt")!r})
    finally:
        open({str(tmp_path / "cleaned")!r}, "w").close()
"""
    first_steps(script_target(written(tmp_path, HEAD + text)), ["9"], Policy())
    assert (tmp_path / "cleaned").exists()
    assert not (tmp_path / "last.pt").exists()


def test_what_the_script_raises_is_raised(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError):
        first_steps(script_target(written(tmp_path, "1 / 0")), [], Policy())
    assert 'train_for_search.py", line 1' in capsys.readouterr().err
    sys.excepthook = sys.__excepthook__


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_the_command_says_how_to_train_with_the_answer(tmp_path, capsys, monkeypatch, steps):
    low_takes(0.5, monkeypatch)
    path = written(tmp_path, HEAD + STYLES["a criterion"])
    files = ["--state", str(tmp_path / "state.json"), "--report", str(tmp_path / "search.html")]
    words = ["search", "--budget", "2", *files]
    assert main([*words, "--script", path, str(steps)]) == 0
    printed = capsys.readouterr()
    assert re.search(rf"^use:   amp-graph run --policy '?bf16-O1.* {re.escape(path)} {steps}$", printed.out, re.M)
    assert f"Net, with 244 parameters; {min(steps, 3)} steps" in printed.err
    assert ("on held-out data" in printed.out) == (steps > 1)
    assert f"again: amp-graph {' '.join(words)} --script {path} {steps}" in printed.out.splitlines()
    assert f"--script {path} {steps}" in (tmp_path / "search.html").read_text()
    assert "O2" not in printed.out  # amp-graph run has no such level
    assert main([*words, "--json", "--script", path, str(steps)]) == 0
    assert json.loads(capsys.readouterr().out)["script"] == f"{path} {steps}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--script"], "--script with nothing"),
        (["model.py:build", "--script", "train.py"], "--script with --target"),
        (["--batch", "one.pt", "--script", "train.py"], "--script with --batch"),
        (["--script", "none.py"], "cannot run none.py"),
        (["--script", "-m", "no_such_module"], "cannot run module no_such_module"),
        (["--report", "none/search.html", "m:f"], "--report none/search.html: it cannot be written"),
        ([], "a TARGET or --script SCRIPT is needed"),
    ],
)
def test_a_wrong_command_line_is_one_error(capsys, words, told):
    assert main(["search", *words]) == 1
    printed = capsys.readouterr().err
    assert told in printed
    assert "fix:" in printed


# Presses Control-C once, in the model, in the second policy that is measured. What comes while Dynamo makes guards in
# C++ is lost.
PRESSES = HEAD.replace(
    "class Net",
    """
@torch.compiler.disable
def press():
    if os.path.exists("search.json") and not os.path.exists("pressed"):
        open("pressed", "w").close()
        os.kill(os.getpid(), signal.SIGINT)

class Net""",
).replace("def forward(self, x, y=None):", "def forward(self, x, y=None):\n        press()")
LISTENS = """
import signal, sys
from amp_graph.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background has none
sys.exit(main())
"""


def test_control_c_ends_a_search_with_the_best_so_far(tmp_path):
    path = written(tmp_path, "import os, signal" + PRESSES + STYLES["a criterion"])
    words = [sys.executable, "-c", LISTENS, "search", "--state", "search.json", "--script", path, "9"]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "best so far fp32" in done.stderr.splitlines()[-1]
    assert "ended: interrupted; the best so far" in done.stdout
    assert "Traceback" not in done.stderr
    assert len(json.loads((tmp_path / "search.json").read_text())["trials"]) == 1
