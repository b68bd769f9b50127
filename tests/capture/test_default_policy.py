"""Without a policy, on a CPU without arithmetic in low precision: no call is lowered at a loss, and reports say so."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import amp_graph
from tests.corpus import CASES, make

MACHINES = Path(__file__).parents[2] / "lists" / "machines"
MODELS = (
    "rotary_mqa einsum_attention autoencoder conv3d wide_and_deep nanogpt gru_bidirectional transformer_encoder "
    "wavenet bert_sdpa gpt2 llama_gqa t5 vit distilbert convnext resnet_basic mobilenet unet mlp_mixer"
).split()
pytestmark = [pytest.mark.by_profit, pytest.mark.filterwarnings("ignore:amp_graph.*not profitable")]


def larger(given, times):
    size = len(next(t for t in tree_leaves(given) if isinstance(t, torch.Tensor)))

    def repeated(leaf):
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size
        return torch.cat([leaf] * times) if is_batch else leaf

    return tree_map(repeated, given)


def calls(name):
    """Run three batch sizes in training and one in evaluation; return the model, and the losses, ours and fp32's."""
    (model, args, kwargs), (plain, *_) = make(name), make(name)
    losses = []
    for training, times in ((True, 1), (True, 2), (True, 3), (False, 2)):
        batch = larger((args, kwargs), times)
        with torch.set_grad_enabled(training):
            for one in (model, plain):
                if one is model and not losses:
                    amp_graph.convert(model)
                losses.append(CASES[name].loss(one.train(training)(*batch[0], **batch[1])))
    return model, losses[::2], losses[1::2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_no_call_is_lowered_where_that_loses(name, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / "cpu.toml"))
    model, losses, exact = calls(name)
    assert torch.allclose(torch.stack(losses), torch.stack(exact), rtol=1e-5, atol=1e-6)
    report = amp_graph.report(model)
    assert report.graphs
    for graph in report.graphs:
        assert graph.predicted.left_alone
        assert graph.predicted.speed < 1 / 0.85  # the least speed for which low precision is worth it
        assert not graph.casts
        assert not any(one.precision == "low" for one in graph.operations)
    text = " ".join(report.text().split())
    said = "left in full precision: low precision is not profitable on cpu, predicted speed {:.2g} times fp32's"
    lines = {said.format(graph.predicted.speed) for graph in report.graphs}
    assert all(text.count(line) == 1 for line in lines)  # graphs of one predicted speed share a line
    assert text.count("left in full precision") == len(lines)
    assert "run in fp32" in text


def test_control_where_it_pays_they_are_lowered(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / "cpu_amx.toml"))
    monkeypatch.setattr("amp_graph.passes.precision.predict_time.WORTH_IT", 0.1)
    model, losses, exact = calls("gpt2")
    assert not torch.allclose(torch.stack(losses), torch.stack(exact), rtol=1e-5, atol=1e-6)
    assert all(graph.casts for graph in amp_graph.report(model).graphs)
