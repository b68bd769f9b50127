"""``amp-graph export``: a file that other programs load, and a summary."""

import json

import pytest
import torch

SOURCE = """
import torch
from torch import nn
def build():
    print("a word of the user's")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)), (torch.ones(8, 16),)
"""


@pytest.fixture
def export(amp):
    return lambda *words: amp("export", "FILE:build", *words)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch's load, 2.11 and 2.12
def test_a_program_of_torch_export_and_its_summary(export, tmp_path):
    path = tmp_path / "model.pt2"
    status, out, _ = export("--to", "pt2", "--output", str(path), "--policy", "fp16", "--fold-weights", "--json")
    told = json.loads(out)
    assert status == 0
    assert told["weights"] == {"float16": 4}
    assert told["casts"] == 2
    assert told["bytes"] == path.stat().st_size
    module = torch.export.load(path).module()
    assert torch.equal(module(torch.ones(8, 16)), module(torch.ones(8, 16))), "dropout is off: evaluation by default"
    status, out, _ = export("--to", "pt2", "--output", str(path), "--policy", "bf16", "--input", "x=f32[3,16]")
    assert status == 0
    assert "weights  {'float32': 4}" in out
    assert torch.export.load(path).module()(torch.ones(3, 16)).shape == (3, 4)


def test_errors_are_one_message(export, tmp_path):
    path = tmp_path / "model.pt2"
    status, _, err = export("--to", "pt2", "--output", str(tmp_path / "none" / "model.pt2"))
    assert (status, "cannot write" in err) == (1, True)
    assert export("--to", "tflite", "--output", str(path))[0] == 2
    assert not path.exists()
