"""`amp-graph plan`: what a plan comes to, and the curve of error budgets, predicted and measured."""

import pytest

from amp_graph.cli.main import main
from tests.passes.planning import machine

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(128, 16)), torch.randn(256, 128)

def converted():
    import amp_graph
    model, x = build()
    return amp_graph.convert(model, "bf16,keep_fp32=2,accuracy=fast"), x

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build()[0]
    def forward(self, x):
        return {"loss": self.body(x).square().mean()}

def with_loss():
    return WithLoss(), torch.randn(256, 128)

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
    def forward(self, x):
        return self.body(x)

class NoGrad(Small):
    forward = torch.no_grad()(Small.forward)

def no_grad():
    return NoGrad(), torch.randn(8, 8)

class Untraced(Small):
    forward = torch.compiler.disable(Small.forward)

def untraced():
    return Untraced(), torch.randn(8, 8)

"""


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    for place in ("amp_graph.cli.command_plan", "amp_graph.passes.precision.plan_precision"):
        monkeypatch.setattr(f"{place}.machine_for", lambda device: machine("cpu_amx"))


def table(capsys, rows):
    """The head, and the cells behind the first one of the next lines, by that."""
    lines = capsys.readouterr().out.splitlines()
    return lines[0], {line.split()[0]: line.split()[1:] for line in lines[2 : 2 + rows]}


def test_a_plan_stands_beside_those_with_names(file, capsys):
    assert main(["plan", f"{file}:build", "--policy", "bf16,accuracy=1.1"]) == 0
    head, rows = table(capsys, 4)
    assert head.startswith("1 graphs, bf16-O1,accuracy=1.1, planned for cpu_amx")
    asked, autocast, fast = (
        dict(zip(("us", "ratio", "error", "low", "full", "casts"), map(float, rows[name]), strict=True))
        for name in ("bf16-O1,accuracy=1.1", "accuracy=autocast", "accuracy=fast")
    )
    assert (autocast["ratio"], autocast["error"]) == (1, 1)
    assert asked["ratio"] == pytest.approx(autocast["us"] / asked["us"], abs=1e-3)
    assert asked["ratio"] >= 1
    assert asked["error"] <= 1.1
    assert fast["low"] > autocast["low"]
    assert fast["casts"] < autocast["casts"]
    assert rows["full"][1:] == [
        rows["full"][1],
        rows["full"][2],
        "0.000",
        "0",
        str(int(fast["low"] + fast["full"])),
        "0",
    ]


def test_the_figures_are_those_of_the_policy(file, capsys):
    found = {}
    for policy in ("bf16", "bf16,accuracy=fast", "bf16,planner=paint", "bf16,deny=gelu"):
        assert main(["plan", f"{file}:build", "--policy", policy]) == 0
        _, rows = table(capsys, 4)
        found[policy] = (next(iter(rows.values())), rows["accuracy=autocast"], rows["accuracy=fast"])
    assert found["bf16"][0] == found["bf16"][1]
    assert found["bf16,accuracy=fast"][0] == found["bf16"][2]
    assert float(found["bf16"][0][0]) <= float(found["bf16,planner=paint"][0][0])
    assert int(found["bf16,deny=gelu"][0][3]) < int(found["bf16"][0][3])


@pytest.mark.parametrize("name", ["converted", "with_loss"])
def test_a_model_that_is_converted_already_and_one_with_a_loss_of_its_own(file, capsys, name):
    assert main(["plan", f"{file}:{name}"]) == 0
    head, rows = table(capsys, 4)
    assert ("keep_fp32=2" in head) == (name == "converted")
    if name == "converted":  # what it keeps in fp32 reads the sums, which are all that may be lower where fast
        assert rows["accuracy=fast"] == rows["accuracy=autocast"]
    else:
        assert float(rows["accuracy=fast"][2]) > 1


def test_the_sweep_predicts_the_plans_of_budgets(file, capsys):
    assert main(["plan", f"{file}:build", "--policy", "bf16", "--sweep", "0.01,1,1000"]) == 0
    _, rows = table(capsys, 6)
    speed, error = ([float(rows[f"accuracy={one}"][at]) for one in ("0.01", "1.0", "1000.0")] for at in (1, 2))
    assert speed == sorted(speed)
    assert speed[1] >= 1
    assert speed[2] >= float(rows["accuracy=fast"][1])
    assert error[0] <= 0.01
    assert error[1] <= 1 < float(rows["accuracy=fast"][2])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["build", "--sweep", "1,x"], "'1,x' is not a list of error budgets"),
        (["build", "--sweep", "0"], "'0' is not a list of error budgets"),
        (["build", "--policy", "bf16-O0"], "level O0 is not supported: plans are for fp32 parameters"),
        (["build", "--policy", "bf16-O2"], "level O2 is not supported: plans are for fp32 parameters"),
        (["build", "--policy", "bf16,lists=autocast_cpu"], "choose per operation, without predicting"),
        (["build", "--policy", "bf16,accuracy=0"], "accuracy=0.0 is not an error budget"),
        (["no_grad"], "does not come from a captured graph, or has no gradient"),
        (["untraced"], "does not come from a captured graph, or has no gradient"),
    ],
)
def test_errors(file, capsys, words, told):
    assert main(["plan", f"{file}:{words[0]}", *words[1:]]) == 1
    shown = capsys.readouterr().err
    assert told in shown
    assert "fix:" in shown
    assert "Traceback" not in shown
