"""`amp-graph cost`: fp32, torch.autocast and the plan, measured in turns, and what follows from it."""

import json

import pytest
import torch

from amp_graph.cli.command_cost import FROZEN, interleaved, verdict

SOURCE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), torch.randn(8, 32)

def converted():
    import amp_graph
    model, x = build()
    return amp_graph.convert(model, "bf16-O1,keep_fp32=3"), x

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
    def forward(self, x):
        return torch.linalg.inv(self.fc(x) @ self.fc(x).mT + torch.eye(len(x)).to(self.fc(x).dtype))
"""


@pytest.fixture
def cost(amp, monkeypatch):
    """Run the command on a target of the file above, and return what it printed as JSON, and as text."""
    monkeypatch.setattr("amp_graph.cli.command_cost.ROUNDS", 1)

    def run(name, *words):
        (status, told, _), (again, text, _) = (amp("cost", f"FILE:{name}", *words, *how) for how in (["--json"], []))
        assert status == again == 0
        return json.loads(told), text

    return run


@pytest.mark.parametrize(("words", "names"), [
    ([], ["fp32", "torch.autocast", "amp_graph"]),
    (["--eval"], ["fp32", "torch.autocast", "amp_graph", FROZEN]),
])  # fmt: skip
@pytest.mark.parametrize(("name", "policy"), [("build", "bf16-O1"), ("converted", "bf16-O1,keep_fp32=3")])
def test_each_precision_has_a_row_with_its_speed_over_fp32s(cost, words, names, name, policy):
    told, text = cost(name, *words)
    assert (told["policy"], told["gradients"]) == (policy, not words)
    assert [row["name"] for row in told["rows"]] == names
    for row in told["rows"]:
        assert row["measured"] == pytest.approx(told["rows"][0]["seconds"] / row["seconds"])
    assert all(row["predicted"] > 0 for row in told["rows"] if row["name"] != FROZEN)
    assert [line for line in text.splitlines() if line.startswith(tuple(names))]
    assert "bf16 with " in text.splitlines()[-1]


def test_what_fails_under_autocast_has_no_row(cost, capsys):
    told, _ = cost("Mixed", "--input", "x=f32[4,32]")
    assert "amp_graph" in [row["name"] for row in told["rows"]], "it falls back to fp32, as every call does"
    failing = {"fp32": lambda: None, "torch.autocast": lambda: torch.ones(2) @ torch.ones(3), "amp_graph": lambda: None}
    assert list(interleaved(failing, "cpu")) == ["fp32", "amp_graph"]
    assert "torch.autocast: fails: RuntimeError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        interleaved({"fp32": lambda: 1 / 0}, "cpu")


@pytest.mark.parametrize(("autocast", "ours", "told"), [
    (0.4, 0.6, "keep fp32 on this machine; at best bf16 with amp_graph: 0.60 times fp32's speed"),
    (1.2, 1.4, "bf16 with amp_graph: 1.40 times fp32's speed"),
    (1.6, 1.4, "bf16 with torch.autocast: 1.60 times fp32's speed"),
    (0.9, 1.02, "keep fp32 on this machine; at best bf16 with amp_graph: 1.02 times fp32's speed"),
])  # fmt: skip
def test_the_verdict_is_what_is_fastest(autocast, ours, told):
    rows = [{"name": "fp32", "measured": 1.0}, {"name": "torch.autocast", "measured": autocast},
            {"name": "amp_graph", "measured": ours}]  # fmt: skip
    assert verdict(rows, "bf16") == told
