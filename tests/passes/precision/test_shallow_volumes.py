"""Convolutions over volumes less deep than the kernel: torch's low-precision gradient of the weight is wrong."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.precision import fp32_operands
from tests.by_hand import step_of
from tests.layers import layers


@layers(lambda: dict(weight=nn.Parameter(torch.randn(8, 8, 3, 3, 3) / 10)))
def ByName(self, x):
    """Names its operands, the weight before the volume."""
    return F.conv3d(weight=self.weight, input=x, padding=1)


SHALLOW = {
    "deep kernel": (lambda: nn.Conv3d(8, 8, 5, padding=2), (2, 8, 2, 6, 6)),
    "one place": (lambda: nn.Conv3d(8, 8, 5, padding=2), (2, 8, 1, 1, 1)),
    "kernel of three": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 2, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose3d(8, 8, 3, padding=1), (2, 8, 2, 4, 4)),
    "stride": (lambda: nn.Conv3d(8, 8, 5, 2, 2), (2, 8, 4, 4, 4)),
    "by name": (ByName, (2, 8, 2, 8, 8)),
    "no batch": (lambda: nn.Conv3d(8, 8, 3, padding=1), (8, 2, 8, 8)),
}
DEEP = {
    "volume": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 4, 4, 4)),
    "patches": (lambda: nn.Conv3d(8, 8, 2, 2), (2, 8, 2, 2, 2)),
    "grows": (lambda: nn.ConvTranspose3d(8, 8, 2, 2), (2, 8, 1, 2, 2)),
    "images": (lambda: nn.Conv2d(8, 8, 5, padding=2), (2, 8, 2, 2)),
}


def precision(model):
    return {n.precision for n in amp_graph.report(model).graphs[0].operations if "conv" in " ".join(n.ops)}


def trained(model, x):
    return [grad.double() for grad in step_of(model, x, loss=lambda out: out.square().sum())[1:]]


@pytest.mark.parametrize(
    ("case", "policy", "low"),
    [
        *((case, policy, False) for case in SHALLOW for policy in ("bf16", "fp16")),
        *((case, "bf16", True) for case in DEEP),
        ("deep kernel", "bf16,emulate=cuda", True),
    ],
)
def test_shallow_ones_train_in_fp32_and_others_are_low_and_right(case, policy, low):
    build, shape = (SHALLOW | DEEP)[case]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    exact = trained(copy.deepcopy(model).double(), x.double())
    ours = amp_graph.convert(model, policy)
    for got, wanted in zip(trained(ours, x), exact, strict=True):
        assert (got - wanted).norm() <= (0.02 if low else 1e-5) * wanted.norm()
    assert precision(ours) == {"low" if low else "full"}


def test_the_backward_of_a_joint_graph_is_full():
    def step(x, w):
        return torch.ops.aten.convolution_backward(
            x, x, w, None, [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1, [True, True, False]
        )[:2]

    given = torch.randn(2, 8, 2, 6, 6), torch.randn(8, 8, 3, 3, 3)
    graph = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="fake")(*given)
    low = amp_graph.rewrite(graph, "bf16", given)
    assert all(torch.equal(a, b) for a, b in zip(low(*given), step(*given), strict=True))


def test_control_without_the_rule_they_would_be_low(monkeypatch):
    monkeypatch.setattr(fp32_operands, "_is_shallow", lambda node, operation: False)
    build, shape = SHALLOW["deep kernel"]
    ours = amp_graph.convert(build(), "bf16")
    ours(torch.randn(shape))  # no backward, which may damage the heap
    assert precision(ours) == {"low"}
