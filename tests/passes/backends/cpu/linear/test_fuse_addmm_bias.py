"""A product whose kernel adds the bias: the same sum, rounded once; what it cannot take stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.linear.fuse_addmm_bias import FuseAddmmBias
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.profitability import gemm_thresholds
from amp_graph.passes.torch_compat.fake import make_fx
from amp_graph.passes.torch_compat.onednn import linear_pointwise

pytestmark = pytest.mark.skipif(linear_pointwise is None, reason="needs oneDNN")
BF16 = torch.bfloat16
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch):
    monkeypatch.setattr(gemm_thresholds, "multiplies_bf16", lambda: True)


def drawn(*shape, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def passed(function, *given):
    """The graph of ``function`` before and after the pass, and how many products changed."""
    plain, ours = (make_fx(function, tracing_mode="fake")(*given) for _ in range(2))
    (done,) = run_passes(ours, [FuseAddmmBias()], checked=True)
    return plain, ours, len(done.result.changes)


X, W, B = drawn(6, 32), drawn(24, 32), drawn(24)


@pytest.mark.multiplied
def test_the_bias_is_added_before_the_sum_is_rounded():
    plain, ours, count = passed(F.linear, X, W, B)
    assert count == 1
    assert [n.target for n in ours.graph.nodes if n.op == "call_function"] == [OPS.linear_bias.default]
    exact = F.linear(X.double(), W.double(), B.double())
    spacing = torch.finfo(BF16).eps * exact.abs() + 1e-6
    assert ((ours(X, W, B).double() - exact).abs() <= 0.51 * spacing).all()
    assert ((plain(X, W, B).double() - exact).abs() <= 0.51 * spacing).all()
    rounded_twice = (F.linear(X, W) + B).double()
    assert not ((rounded_twice - exact).abs() <= 0.51 * spacing).all()


@pytest.mark.parametrize("x", [X, X.index_fill(0, torch.tensor(1), float("nan"))])
@pytest.mark.multiplied
def test_a_relu_behind_it_stays_and_lets_nan_through(x):
    plain, ours, count = passed(lambda x, w, b: F.linear(x, w, b).relu(), x, W, B)
    assert count == 1
    assert torch.equal(ours(x, W, B).isnan(), plain(x, W, B).isnan())


LEFT = {
    "fp32": (F.linear, (X.float(), W.float(), B.float())),
    "a weight that does not lie in rows": (lambda x, w, b: torch.addmm(b, x, w), (X, W.t().contiguous(), B)),
    "a bias of rows": (lambda x, w, b: torch.addmm(b, x, w.t()), (X, W, drawn(6, 24))),
    "one number as the bias": (lambda x, w, b: torch.addmm(b, x, w.t()), (X, W, drawn(1))),
    "a factor": (lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5), (X, W, B)),
    "few outputs": (F.linear, (X, W[:8], B[:8])),
    "images that do not lie in rows": (F.linear, (drawn(32, 6).t(), W, B)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_the_kernel_does_not_take_stays(case):
    function, given = LEFT[case]
    plain, ours, count = passed(function, *given)
    assert count == 0
    assert torch.equal(plain(*given), ours(*given))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.second(self.first(x).relu()).square().mean()


def compiled_gradients(policy):
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), policy, compile="inductor")
    model(X.float()).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.multiplied
def test_compiled_code_calls_the_kernel(monkeypatch):
    seen = []
    kept = FuseAddmmBias.run

    def run(self, gm):
        seen.append(kept(self, gm))
        return seen[-1]

    monkeypatch.setattr(FuseAddmmBias, "run", run)
    torch.manual_seed(0)
    plain = Net()
    plain(X.float()).backward()
    caches = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(fx_graph_cache=False), caches:
        ours = compiled_gradients("bf16")
        counts = [len(result.changes) for result in seen]
        without = compiled_gradients("bf16,skip=fuse_addmm_bias")
    assert counts == [2, 0], "two linears in forward, none in backward"
    assert len(seen) == 2
    for got, other, wanted in zip(ours, without, [p.grad for p in plain.parameters()], strict=True):
        assert (got - wanted).norm() <= 2e-2 * wanted.norm()
        assert (got - other).norm() <= 1e-2 * wanted.norm()


def stepped(policy):
    torch.manual_seed(0)
    model = Net()
    step = amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters(), 0.1), policy)
    losses = [step(X.float() + i) for i in range(4)]
    return losses, list(model.parameters()), step.graph_text()


@pytest.mark.multiplied
def test_eager_steps_call_the_kernel():
    ours, without = stepped("bf16"), stepped("bf16,skip=fuse_addmm_bias")
    assert ours[2].count("amp_graph.linear_bias") == 2
    assert without[2].count("aten.addmm.default") == 2
    torch.testing.assert_close(ours[0], without[0], rtol=1e-2, atol=0)
    for got, other in zip(ours[1], without[1], strict=True):
        assert (got - other).norm() <= 1e-2 * other.norm()


def test_lists_that_are_pytorchs_keep_its_operations():
    assert "linear_bias" not in stepped("bf16,lists=autocast_cpu")[2]
