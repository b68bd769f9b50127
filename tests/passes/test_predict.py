"""The predicted time of a plan over full precision's: counted by hand, and on the right side of one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import amp_graph
from tests.passes.planning import machine

FLOPS, BYTES = 1e9, 1e8  # of the machine below: a product of n x n x n is not bound by what it moves


@pytest.fixture
def plain(monkeypatch):
    """A machine with round rates, on which calls cost nothing and bf16 products take half the time."""
    families = ("matvec", "elementwise", "activation", "normalization")
    rates = {name: {"float32": BYTES, "bfloat16": BYTES, "float16": BYTES} for name in families}
    rates |= {name: {"float32": FLOPS, "bfloat16": 2 * FLOPS} for name in ("matmul", "convolution", "attention")}
    rates["cast"] = {"bfloat16": BYTES}
    made = SimpleNamespace(name="plain", rates=rates, call=0.0, kept=BYTES)
    monkeypatch.setattr("amp_graph.read_graph.machine_for", lambda device: made)


def predicted(model, x, policy="bf16", grad=True):
    amp_graph.convert(model, policy)
    with torch.set_grad_enabled(grad):
        model(x)
    (graph,) = amp_graph.report(model).graphs
    return graph.predicted


N = 512


def test_one_linear_without_gradients_by_hand(plain):
    found = predicted(nn.Linear(N, N, bias=False), torch.randn(N, N), "bf16,weight_copies=false", grad=False)
    product = 2 * N**3 / FLOPS
    casts = 3 * N * N * (4 + 2) / BYTES  # of the input, the weight and the output
    assert found.ratio == pytest.approx((product / 2 + casts) / product)
    assert found.machine == "plain"


def test_a_kept_weight_is_not_cast_at_each_call_without_gradients(plain):
    found = predicted(nn.Linear(N, N, bias=False), torch.randn(N, N), "bf16,skip=pack_weights", grad=False)
    product = 2 * N**3 / FLOPS
    assert found.ratio == pytest.approx((product / 2 + 2 * N * N * (4 + 2) / BYTES) / product)


def test_backward_counts_its_products_and_the_casts_of_gradients(plain):
    found = predicted(nn.Linear(N, N, bias=False), torch.randn(N, N))
    product = 2 * 2 * N**3 / FLOPS  # the input needs no gradient
    casts = (1 + 2 + 2) * N * N * (4 + 2) / BYTES  # of the input; of weight and output, and of their gradients
    assert found.ratio == pytest.approx((product / 2 + casts) / product)


def test_all_in_full_precision_has_no_prediction():
    assert predicted(nn.Linear(8, 8), torch.randn(4, 8), "bf16,deny=linear") is None


@pytest.mark.parametrize(("batch", "policy", "pays"), [(1, "bf16", False), (512, "bf16", True), (512, "fp16", False)])
def test_what_does_not_pay_is_said(batch, policy, pays, monkeypatch, tmp_path):
    monkeypatch.setattr("amp_graph.read_graph.machine_for", lambda device: machine("cpu_bf16"))
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    found = predicted(model, torch.randn(batch, 256), policy)
    assert (found.ratio < 1) == pays
    report = amp_graph.report(model)
    assert ("low precision does not pay on cpu_bf16: predicted time " in report.text()) == (not pays)
    report.html(tmp_path / "report.html")
    assert ("low precision does not pay" in (tmp_path / "report.html").read_text()) == (not pays)
    assert report.to_dict()["graphs"][0]["predicted"]["ratio"] == found.ratio


def test_the_policy_that_it_advises_leaves_alone_what_does_not_pay(monkeypatch):
    for place in ("amp_graph.read_graph", "amp_graph.passes.plan_precision"):
        monkeypatch.setattr(f"{place}.machine_for", lambda device: machine("cpu_bf16"))
    policy = "bf16,skip_unprofitable=true"
    assert predicted(nn.Linear(256, 256), torch.randn(1, 256), policy) is None
