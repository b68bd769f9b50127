"""``--json``: every command prints what it shows as JSON, and nothing else on stdout."""

import json

import pytest

from amp_graph.cli.main import parser
from amp_graph.cli.terminal import json_text

SOURCE = """
import torch
from torch import nn

def build():
    print("from the user")
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(8, 16)
"""


@pytest.fixture
def printed(amp):
    """Run a command with ``--json`` on a small model, and return what it printed, read."""

    def run(command, *words, target=True):
        status, out, _ = amp(command, *["FILE:build"] * target, *words, "--json")
        assert status == 0
        return json.loads(out)

    return run


def test_every_command_takes_json():
    commands = next(a for a in parser()._actions if a.choices and "dump" in a.choices).choices
    without = {name for name, one in commands.items() if "--json" not in one._option_string_actions}
    assert without == set()


def test_explain_tells_each_node(printed):
    (one,) = printed("explain", "gelu", "--policy", "bf16")
    assert one["operation"] == "aten.gelu"
    assert one["precision"] in ("low", "full")
    assert len(one["inputs"]) == 1


def test_dump_is_the_report_and_a_step_is_its_text(printed):
    assert [graph["index"] for graph in printed("dump", "--policy", "bf16")["graphs"]] == [0]
    step = printed("dump", "--policy", "bf16", "--step", "SGD")
    assert step["optimizer"] == "SGD"
    assert "bf16" in step["graph"]


def test_lists_has_rules_or_a_note(printed):
    told = printed("lists", "gelu", "--policy", "bf16", target=False)
    assert {rule["operation"] for rule in told["rules"]} >= {"aten.gelu"}
    assert len(printed("lists", target=False)["rules"]) > 100
    unlisted = printed("lists", "aten.view", "--policy", "bf16", target=False)
    assert bool(unlisted["rules"]) != ("note" in unlisted)


def test_plan_and_cost_have_numbers(printed):
    plans = {row["plan"]: row for row in printed("plan", "--policy", "bf16")["plans"]}
    assert plans["full precision"]["low"] == 0
    assert plans["bf16-O1"]["low"] > 0
    told = printed("cost", "--policy", "bf16")
    assert [row["name"] for row in told["rows"]] == ["fp32", "torch.autocast", "amp_graph"]
    assert all(row["measured"] > 0 and row["seconds"] > 0 for row in told["rows"])


def test_numbers_that_json_lacks_are_text():
    assert json.loads(json_text({"a": [float("inf"), float("nan"), 1.5]})) == {"a": ["inf", "nan", 1.5]}
