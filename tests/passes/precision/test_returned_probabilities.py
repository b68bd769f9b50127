"""A sigmoid whose probabilities leave the model or go to a loss is computed in full precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from tests.by_hand import step_of
from tests.layers import layers, linear_of

LOGITS = torch.tensor([[-14.0], [9.0], [11.0], [14.0]])


@layers(lambda leave: dict(linear=linear_of(torch.ones(1, 1), torch.zeros(1)), leave=leave))
def Confident(self, x):
    """Logits that a trained classifier has; ``leave`` is what becomes of their probabilities."""
    return self.leave(torch.sigmoid(self.linear(x)))


def loss_and_gradient(model, loss_of, low=None):
    context = torch.autocast("cpu", low, enabled=low is not None)
    out, gradient, _ = step_of(model, LOGITS, loss=lambda out: loss_of(out.float()), context=context)
    return torch.stack([loss_of(out.float()), gradient.squeeze()])


def wrong_labels(p):
    return F.binary_cross_entropy(p.reshape(-1), torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("leave", [lambda p: p, lambda p: p.squeeze(1), lambda p: (p, p.float())[1]])
def test_a_loss_of_probabilities_near_one_is_that_of_fp32(leave):
    exact = loss_and_gradient(Confident(leave), wrong_labels)
    theirs = loss_and_gradient(Confident(leave), wrong_labels, torch.bfloat16)
    ours = loss_and_gradient(amp_graph.convert(Confident(leave), "bf16"), wrong_labels)
    assert (theirs - exact).abs().max() > 10  # infinite logarithms, which the loss bounds at 100
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)


def test_a_loss_inside_of_the_graph_reads_full_probabilities():
    exact = loss_and_gradient(Confident(wrong_labels), lambda loss: loss)
    ours = loss_and_gradient(amp_graph.convert(Confident(wrong_labels), "bf16"), lambda loss: loss)
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)


@layers(lambda: dict(gate=nn.Linear(8, 8), out=nn.Linear(8, 8)))
def Gate(self, x):
    return self.out(x * torch.sigmoid(self.gate(x)))


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (Gate(), "bf16"),  # a product reads it
        (Confident(lambda p: p), "bf16,keep_outputs=false"),
        (Confident(lambda p: p), "bf16,follow=aten.sigmoid"),  # as the user asks
        (Confident(lambda p: p), "bf16,lists=mine.toml"),
        (Confident(lambda p: p), "bf16,lists=autocast_cpu"),  # as torch.autocast does
    ],
)
def test_other_sigmoids_are_as_low_as_before(model, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[[op]]\nop = ["aten.sigmoid"]\nclass = "follow"\nwhy = "mine"\n')
    x = torch.randn(4, model.gate.in_features if isinstance(model, Gate) else 1)
    converted = amp_graph.convert(model, policy)
    converted(x)
    assert " sigmoid " in amp_graph.report(converted).text().split("  low ", 1)[1].split("  full ")[0]
