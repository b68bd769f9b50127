"""Gradients of weights in flat graphs, by matrix units: which products become the kernel's, and steps that train."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.linear import amx_gemm as kernel
from amp_graph.passes.backends.cpu.linear import (
    lower_linears,
    lower_weight_gradients,
    panel_gemm,
)
from amp_graph.passes.backends.cpu.linear.lower_weight_gradients import LowerWeightGradients
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native.kernel_table import typed
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat.fake import make_fx
from tests.by_hand import descend
from tests.layers import layers
from tests.passes.builds import built, memory_that_is_not_zero  # noqa: F401
from tests.passes.whole_steps import stepped

BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(panel_gemm.library() is None, reason="needs AVX512_BF16 and a C compiler")


@pytest.fixture(params=["matrix units", "emulated units"], autouse=True)
def _built_for(request, monkeypatch):
    found = typed(built(kernel.SOURCE, request.param), kernel.FUNCTIONS)
    for module in (kernel, lower_weight_gradients):
        monkeypatch.setattr(module, "library", lambda: found)


@pytest.fixture(autouse=True)
def _is_always_profitable(monkeypatch):
    for module in (kernel, lower_weight_gradients):
        monkeypatch.setattr(module, "amx_product_is_profitable", lambda device, dtype, *sizes: dtype == BF16)
    monkeypatch.setattr(lower_linears, "small_linear_is_profitable", lambda *form: False)
    monkeypatch.setattr(lower_linears, "MOST_OF_A_CALL", 0)


def passed(function, *given):
    plain, ours = (make_fx(function, tracing_mode="fake")(*given) for _ in range(2))
    (done,) = run_passes(ours, [LowerWeightGradients()], checked=True)
    return plain, ours, [c.action for c in done.result.changes]


G, X = torch.randn(24, 40).to(BF16), torch.randn(24, 32).to(BF16)


# With how many products, and how many with sums of what they read; what adds up otherwise, or before it, is torch's.
GRAPHS = {
    "two products": (lambda g, x: (torch.mm(t := g.t(), x), torch.mm(t, x * 2), t.sum()), 2, 0),
    "with a bias": (
        lambda g, x: (torch.mm(g.t(), x), g.sum(0), g.sum(0, keepdim=True), g.sum(1), torch.mm(g.t(), x * 2)), 1, 1,
    ),
    "added up before": (lambda g, x: (g.sum(0), torch.mm(g.t(), x)), 1, 0),
    "added up otherwise": (lambda g, x: (torch.mm(g.t(), x), (g * 2).sum(0)), 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_products_of_a_flat_graph(name):
    function, *counts = GRAPHS[name]
    plain, ours, actions = passed(function, G, X)
    assert actions == ["own kernel"] * sum(counts)
    targets = [n.target for n in ours.graph.nodes]
    assert [targets.count(op.default) for op in (OPS.amx_product, OPS.amx_product_and_sums)] == counts
    torch.testing.assert_close(list(ours(G, X)), list(plain(G, X)), rtol=2**-7, atol=1e-2)


LEFT = {
    "in rows": (torch.mm, (G.t().contiguous(), X)),
    "fp32": (lambda g, x: torch.mm(g.t(), x), (G.float(), X.float())),
    "two transposed": (lambda g, x: torch.mm(g.t(), x.t()), (G, torch.randn(32, 24).to(BF16))),
    "gaps": (lambda g, x: torch.mm(g[:, ::2].t(), x), (G, X)),
    "one row": (lambda g, x: torch.mm(g[:, :1].t(), x), (G, X)),
}


@pytest.mark.parametrize("name", LEFT)
def test_all_else_is_left_alone(name):
    function, given = LEFT[name]
    assert not passed(function, *given)[2]


@layers(lambda: dict(first=nn.Linear(32, 64), second=nn.Linear(64, 32, bias=False)), seed=0)
def Net(self, x):
    return self.second(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compile", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_trains_as_the_loop(compile):
    x = torch.randn(24, 32)
    policies = ("bf16", "bf16,skip=lower_weight_gradients")
    ours, plain = (stepped(Net, F.mse_loss, [(x, x)] * 3, policy, compile=compile) for policy in policies)
    if compile == "eager":
        assert ("amx_product" in ours.text, "amx_product" in plain.text) == (True, False)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=2**-8, atol=0)
    loop = amp_graph.convert(Net(), "bf16")
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    for expected in ours.losses:
        loss = descend(optimizer, F.mse_loss(loop(x), x))
        torch.testing.assert_close(loss.detach(), expected, rtol=2**-7, atol=0)


def test_a_step_leaves_no_thread_idle(monkeypatch):
    monkeypatch.setattr(lower_weight_gradients, "one_of_two_threads_idles", lambda device, dtype, *sizes: dtype == BF16)
    x = torch.randn(24, 32)
    policies = ("bf16", "bf16,skip=lower_weight_gradients|lower_linears")
    ours, plain = (stepped(Net, F.mse_loss, [(x, x)] * 3, policy) for policy in policies)
    assert not [name for name in ("aten.mm.", "aten.addmm.") if name in ours.text]
    torch.testing.assert_close(ours.losses, plain.losses, rtol=2**-7, atol=0)
