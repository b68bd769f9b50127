"""What people find in PyTorch's own logs: ``TORCH_LOGS=amp_graph`` and ``TORCH_TRACE``."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import amp_graph

SCRIPT = """
import torch, amp_graph
from torch import nn
model = amp_graph.convert(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), "bf16")
model(torch.randn(4, 64)).sum().backward()
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """What a process says under both variables, and the lines of its trace."""
    folder = tmp_path_factory.mktemp("logged")
    wanted = {"AMP_GRAPH_MACHINE": "default", "TORCH_LOGS": "amp_graph", "TORCH_TRACE": str(folder / "trace")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env={**os.environ, **wanted}, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    (log,) = (folder / "trace").iterdir()
    return done.stderr, log.read_text().splitlines()


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_graph_is_logged_once_and_in_full_only_at_debug(level, caplog):
    model = amp_graph.convert(nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)), "bf16")
    with caplog.at_level(level, logger="amp_graph"):
        model(torch.randn(4, 64))
    told = [record.getMessage() for record in caplog.records if record.name == "amp_graph"]
    assert told[0].startswith("graph under bf16-O1: ")
    assert len(told) == 1 + (level == logging.DEBUG)
    if level == logging.DEBUG:
        (softmax,) = (line for line in told[1].splitlines() if " = softmax: " in line)
        assert ": full: the kernel takes" in softmax


def test_nothing_is_logged_by_default(caplog):
    amp_graph.convert(nn.Linear(64, 64), "bf16")(torch.randn(4, 64))
    assert not [record for record in caplog.records if record.name == "amp_graph"]


def test_torch_reads_the_name_from_its_variable(logged):
    assert "graph under bf16-O1: " in logged[0]


def test_the_trace_has_three_artifacts_for_a_graph(logged):
    _, lines = logged
    found = {}
    for at, line in enumerate(lines):
        if '"artifact"' in line and "amp_graph_" in line:
            payload = [one.strip("\t") for one in lines[at + 1 :]]
            end = next((i for i, one in enumerate(lines[at + 1 :]) if not one.startswith("\t")), len(payload))
            name = json.loads(line[line.index("{") :])["artifact"]["name"]
            found[name] = "\n".join(payload[:end])
    assert set(found) == {"amp_graph_captured", "amp_graph_plan", "amp_graph_rewritten"}
    assert "bf16" not in found["amp_graph_captured"]
    assert "bf16" in found["amp_graph_rewritten"]
    plan = json.loads(found["amp_graph_plan"])
    assert {"low", "cast"} <= {row["precision"] for row in plan}
    assert all(row["reason"] for row in plan)
