"""Planned precision that a pass does not keep: the report names the product, and what it ran in."""

import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.casts.product_precision import lost_in
from tests.layers import layers


@layers(lambda: dict(first=nn.Linear(16, 16), last=nn.Linear(16, 4)))
def Net(self, x):
    return self.last(F.gelu(self.first(x)))


def rewritten():
    torch.manual_seed(0)
    args = [torch.randn(8, 16), *(p.detach().requires_grad_() for p in Net().parameters())]

    def forward(x, a, b, c, d):
        return (F.linear(F.gelu(F.linear(x, a, b)), c, d),)

    return amp_graph.rewrite(torch.fx.symbolic_trace(forward), "bf16,skip=lower-linears", args)


def test_a_cast_that_is_missing_is_named():
    gm = rewritten()
    assert list(lost_in(gm)) == []
    (node,) = (n for n in gm.graph.nodes if n.name == "linear")
    node.args = tuple(a.all_input_nodes[0] for a in node.args)  # without the casts
    assert [str(lost) for lost in lost_in(gm)] == ["linear: linear ran in f32, planned bf16"]
