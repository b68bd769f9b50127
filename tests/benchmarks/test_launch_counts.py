"""Launches and bytes of small models planned for CUDA: no more than the committed table has, which can only shrink."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def counts():
    return importlib.import_module("launch_counts")


TABLE = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "launch_counts.json").read_text())


def test_no_count_is_larger_than_autocasts():
    for found in TABLE.values():
        for policy in ("bf16", "bf16,accuracy=fast", "fp16"):
            assert found[policy]["launches"] <= found[f"autocast {policy[:4]}"]["launches"]


QUICK = {("tiny mlp", "bf16"), ("tiny gpt", "bf16"), ("tiny concat", "bf16"), ("tiny cnn", "bf16")}
TINY = [
    pytest.param(name, policy, marks=() if (name, policy) in QUICK else pytest.mark.slow)
    for name in TABLE
    if name.startswith("tiny")
    for policy in ("bf16", "bf16,accuracy=fast", "fp16")
]


@pytest.mark.parametrize(("name", "policy"), TINY)
def test_no_number_of_a_small_model_grows(counts, name, policy):
    found, held = counts.costs(name, policy), TABLE[name][policy]
    assert found["launches"] <= held["launches"]
    assert found["bytes"] <= held["bytes"]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("tiny concat", "eliminate_casts"),
        ("tiny gpt", "batch_weight_casts"),
        ("tiny cnn", "global_avg_pool_gradient"),
    ],
)
def test_without_a_pass_a_count_is_larger(counts, name, word):
    assert counts.costs(name, f"bf16,skip={word}")["launches"] > TABLE[name]["bf16"]["launches"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny gpt", "tiny llama"])
def test_autocasts_numbers_are_those_of_autocast(counts, name):
    """By its lists for the CPU, where it runs without a GPU."""
    policy = counts.AUTOCAST["autocast bf16"].replace("autocast_cuda", "autocast_cpu")
    assert counts.costs(name, policy, "cpu") == counts.traced_autocast(name, torch.bfloat16)


def test_views_and_empty_memory_are_no_launches(counts):
    def run(x):
        return ((x.t().unsqueeze(0).transpose(1, 2).view(-1) + torch.empty(12).fill_(1)).sum(),)

    found = counts.launches(run, [torch.ones(3, 4).requires_grad_()])
    assert not any(word in name for name in found for word in ("view", "aten.t.", "empty"))
    assert found["aten.add.Tensor"] == found["aten.sum.default"] == 1


def made(counts, run, *given):
    return counts.flat(lambda *x: (run(*x).sum(),), [g.requires_grad_() for g in given])


def node_of(counts, graph, name):
    costs = sys.modules["launch_costs"]
    (node,) = [n for n in graph.nodes if costs.name_of(n) == name]
    return costs.kernels(node), costs.moved(node)


def test_one_kernel_copies_a_list_whose_strides_are_those_of_their_places(counts):
    def copied(x, y):
        a, b = x.detach(), y.detach()
        into = [torch.empty_like(a), torch.empty_like(b)]
        torch._foreach_copy_(into, [a, b.t() if b.shape[0] == b.shape[1] else b])
        return x.sum() + y.sum()

    alike = made(counts, copied, torch.ones(3, 4), torch.ones(2, 5))
    assert node_of(counts, alike, "_foreach_copy_") == (1, 2 * 22 * 4)
    transposed = made(counts, copied, torch.ones(3, 4), torch.ones(2, 2))
    assert node_of(counts, transposed, "_foreach_copy_")[0] == 2


def test_kernels_of_large_lists_have_a_limit(counts):
    costs = sys.modules["launch_costs"]
    lists = [[torch.empty(n, device="meta") for n in sizes] for sizes in ([(8,)] * 64, [(8,)] * 65, [(65536 * 321,)])]
    assert [costs._foreach("_foreach_copy_", [one, one]) for one in lists] == [1, 2, 2]


def test_a_metadata_write_is_no_kernel_and_gradients_are_one_each(counts):
    graph = made(
        counts, lambda x, w: torch.conv2d(x, w).as_strided_((1,), (1,)), torch.ones(1, 2, 4, 4), torch.ones(3, 2, 1, 1)
    )
    assert node_of(counts, graph, "as_strided_") == (0, 0)
    assert node_of(counts, graph, "convolution")[0] == 1
    assert node_of(counts, graph, "convolution_backward")[0] == 2


def test_an_embedding_moves_what_it_looks_up(counts):
    ids = torch.tensor([1, 2])
    graph = made(counts, lambda w: torch.nn.functional.embedding(ids, w), torch.ones(1000, 8))
    assert node_of(counts, graph, "embedding")[1] == 2 * 2 * 8 * 4 + 2 * 8
