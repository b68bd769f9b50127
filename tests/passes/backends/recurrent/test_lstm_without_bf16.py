"""LSTMs on a CPU for which oneDNN has no bf16, where torch.autocast raises an error: every policy runs them."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.precision import classify

POLICIES = ("bf16", "bf16,lists=autocast_cpu", "bf16,allow=lstm|mkldnn_rnn_layer", "bf16-O2")
REASON = "oneDNN has no LSTM in low precision for this CPU"

PROGRAM = """
import copy, sys, torch
from torch import nn
import amp_graph

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True, bidirectional=True), nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0])

def step(model, x):
    out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]

torch.manual_seed(0)
model, x = Words(), torch.randn(4, 3, 16)
wanted = step(model, x)
model.zero_grad()
try:
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
except RuntimeError as error:
    assert "LSTM" in str(error)
else:
    raise AssertionError("torch.autocast runs it: this is no such CPU")
compile, *policies = sys.argv[1:]
for policy in policies:
    ours = amp_graph.convert(copy.deepcopy(model), policy, compile=compile)
    for got, true in zip(step(ours, x), wanted, strict=True):
        assert (got - true).norm() <= 0.02 * true.norm(), policy
    with torch.no_grad():
        assert (ours(x) - wanted[0]).norm() <= 0.02 * wanted[0].norm(), policy
"""


@pytest.mark.parametrize("compile", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_every_policy_runs_and_is_near_to_fp32(compile):
    """In a process of its own, as torch and oneDNN look at the CPU once."""
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, compile, *POLICIES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("takes", [False, pytest.param(True, marks=pytest.mark.onednn)])
def test_the_plan_keeps_it_full_and_says_why(takes, monkeypatch):
    monkeypatch.setattr(classify, "onednn_takes_bf16", lambda: takes)
    model = amp_graph.convert(nn.LSTM(8, 8), "bf16,lists=autocast_cpu")
    with torch.no_grad():
        model(torch.randn(3, 2, 8))
    assert (REASON in amp_graph.report(model).text(width=None)) is not takes
