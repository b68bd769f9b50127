"""Launches of small models planned for CUDA: no more than the committed table has, which can only shrink."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import launch_counts

    yield launch_counts
    for name in ("launch_counts", "models", "model_case", "image_models", "large_models", "memory_models", "adapters"):
        sys.modules.pop(name, None)


TABLE = json.loads((BENCHMARKS / "results" / "launch_counts.json").read_text())


@pytest.mark.parametrize("name", ["tiny mlp", "tiny gpt", "tiny concat"])
def test_no_count_grows(counts, name):
    found = counts.count(name, "bf16")
    assert found <= TABLE[name]["bf16"]
    assert found <= TABLE[name]["autocast bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "fp16"])
@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith("tiny")])
def test_no_count_of_a_small_model_grows(counts, name, policy):
    assert counts.count(name, policy) <= TABLE[name][policy]


@pytest.mark.parametrize(("name", "word"), [("tiny concat", "eliminate_casts"), ("tiny gpt", "batch_weight_casts")])
def test_without_a_pass_a_count_is_larger(counts, name, word):
    assert counts.count(name, f"bf16,skip={word}") > TABLE[name]["bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny gpt", "tiny llama"])
def test_autocasts_counts_are_those_of_autocast(counts, name):
    """By its lists for the CPU, where it runs without a GPU."""
    policy = counts.AUTOCAST["autocast bf16"].replace("autocast_cuda", "autocast_cpu")
    assert counts.count(name, policy, "cpu") == counts.traced_autocast(name, torch.bfloat16)


def test_views_and_empty_memory_are_no_launches(counts):
    def run(x):
        return ((x.t().unsqueeze(0).transpose(1, 2).view(-1) + torch.empty(12).fill_(1)).sum(),)

    found = counts.launches(run, [torch.ones(3, 4).requires_grad_()])
    assert not any(word in name for name in found for word in ("view", "aten.t.", "empty"))
    assert found["aten.add.Tensor"] == found["aten.sum.default"] == 1
