"""A frozen base in half precision with adapters in fp32, behind checkpoints and graph breaks: dtypes and gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from tests.layers import forward_of, layers

BF16, FP16 = torch.bfloat16, torch.float16
POLICY = {BF16: "bf16", FP16: "fp16"}


@layers(
    lambda dtype: dict(
        base=nn.Linear(16, 16).to(dtype).requires_grad_(False),
        down=nn.Linear(16, 2, bias=False),
        up=nn.Linear(2, 16, bias=False),
    )
)
def Adapted(self, x):
    """A frozen linear in half precision with a LoRA in fp32, which returns what the linear returns."""
    result = self.base(x)
    return (result + self.up(self.down(x.to(self.down.weight.dtype)))).to(result.dtype)


@layers(
    lambda dtype, run, *, breaks: dict(
        breaks=breaks,
        embed=nn.Embedding(10, 16).to(dtype).requires_grad_(False),
        blocks=nn.ModuleList(Adapted(dtype) for _ in range(2)),
        run=run,
        head=nn.Linear(16, 4).to(dtype).requires_grad_(False),
    )
)
def Model(self, ids):
    x = self.embed(ids).requires_grad_()
    for block in self.blocks:
        x = x + self.run(block, x).tanh()
    if self.breaks:
        torch._dynamo.graph_break()
    return self.head(x)


RUNS = {
    "behind a graph break": lambda block, x: block(x),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "nested": lambda block, x: checkpoint(lambda y: checkpoint(block, y, use_reentrant=True), x, use_reentrant=True),
}


def trained(model, call):
    out = call(torch.arange(6).view(2, 3))
    out.float().square().sum().backward()
    return out, [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("run", "dtype", "policy"),
    [*((run, BF16, BF16) for run in RUNS), ("behind a graph break", FP16, BF16), ("reentrant", BF16, FP16)],
)
def test_a_half_base_trains_as_under_autocast_and_returns_what_it_returns(run, dtype, policy):
    model = Model(dtype, RUNS[run], breaks=run == "behind a graph break")
    wide, cast, eager = copy.deepcopy(model).float(), copy.deepcopy(model), copy.deepcopy(model)
    exact = trained(wide, wide)

    def error(model, call):
        out, grads = trained(model, call)
        pairs = [(out, exact[0]), *zip(grads, exact[1], strict=True)]
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs), out.dtype

    known, kind = error(cast, torch.autocast("cpu", policy)(cast))
    as_written, _ = error(eager, eager)
    found, found_kind = error(model, amp_graph.convert(model, POLICY[policy]))
    assert found <= 1.2 * max(known, as_written)  # what is written in half precision stays so
    if dtype is policy:
        assert found_kind is kind is dtype
    graphs = amp_graph.report(model).graphs
    assert not any(graph.unplanned for graph in graphs)
    assert any(graph.casts for graph in graphs)


@forward_of(nn.Linear)
def Lowered(self, x):
    torch._dynamo.graph_break()
    h = nn.Linear.forward(self, x)
    return (x * 2).to(h.dtype)


def test_a_conversion_to_the_dtype_of_a_value_that_autocast_lowered_is_not_the_users():
    assert amp_graph.convert(Lowered(4, 4), "bf16")(torch.randn(2, 4)).dtype is torch.float32
