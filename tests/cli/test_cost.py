"""`amp-graph cost`: the predicted and the measured time of every operation, by family."""

import pytest
import torch

from amp_graph.cli.main import main
from tests.passes.planning import machine

SOURCE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8)), torch.randn(64, 256)

def converted():
    import amp_graph
    model, x = build()
    return amp_graph.convert(model, "bf16-O1,keep_fp32=3"), x
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "model.py").write_text(SOURCE)
    return str(tmp_path / "model.py")


def table(capsys):
    lines = capsys.readouterr().out.splitlines()
    return lines[0], {tuple(line.split()[:2]): line.split()[2:] for line in lines[2:]}


def test_the_table_counts_every_operation_in_its_family(target, capsys):
    assert main(["cost", f"{target}:build", "--policy", "bf16"]) == 0
    head, rows = table(capsys)
    assert head.startswith("graph 0: forward, planned for ")
    counts = {key: int(row[0]) for key, row in rows.items() if key[0] != "all"}
    assert counts[("matmul", "bfloat16")] == 2
    assert counts[("activation", "bfloat16")] == 1
    assert counts[("normalization", "bfloat16")] == 1
    assert counts[("cast", "bfloat16")] >= 5
    assert rows[("all", str(sum(counts.values())))]


def test_predictions_are_those_of_the_machine_that_is_planned_for(target, capsys, monkeypatch):
    predicted = {}
    for name in ("cpu_amx", "cpu"):
        monkeypatch.setattr("amp_graph.cli.command_cost.machine_for", lambda device, name=name: machine(name))
        assert main(["cost", f"{target}:build", "--policy", "bf16"]) == 0
        head, rows = table(capsys)
        assert name in head
        predicted[name] = float(rows[("matmul", "bfloat16")][1])
        assert all(float(row[2]) > 0 for key, row in rows.items() if key[0] != "all")
    flops = 2 * 64 * 256 * 512 + 2 * 64 * 512 * 8
    assert predicted["cpu"] > 1e6 * flops / machine("cpu").rates["matmul"]["bfloat16"]
    assert predicted["cpu"] > 5 * predicted["cpu_amx"]


def test_a_model_that_is_converted_already_keeps_its_policy(target, capsys):
    assert main(["cost", f"{target}:converted"]) == 0
    _, rows = table(capsys)
    assert rows[("matmul", "bfloat16")][0] == "1"
    assert rows[("matmul", "float32")][0] == "1"


def test_what_is_measured_is_what_the_graph_computes(target):
    """The stopwatch runs the graph itself: its result is the model's."""
    from amp_graph.cli.command_cost import _keeping, _Stopwatch
    from amp_graph.convert import convert

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    x, runs = torch.randn(4, 8), []
    convert(model, "bf16", compile=_keeping(runs))
    want = model(x)
    ((gm, given),) = runs
    watch = _Stopwatch(gm, "cpu")
    (got,) = watch.run(*given)
    assert torch.equal(got, want)
    assert {n.op for n in watch.taken} <= {"call_function", "call_method"}
    assert len(watch.taken) >= 2
