"""Code that escapes capture and meets an operation without a kernel in low precision: it runs in fp32 there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.escaped_code import EscapedCode
from amp_graph.kernels_in_fp32 import MISSING, widen_where_no_kernel

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Escapes(nn.Module):
    """Two linears, which are captured, around a function, which is not."""

    def __init__(self, function, inner=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 4)
        self.function = torch._dynamo.disable(function)
        self.inner = inner

    def forward(self, x):
        h = self.first(x)
        h = self.function(h) if self.inner is None else self.inner(self.function, h)
        return self.second(h)


def positive(function):
    return lambda h: function(h.abs() + 1)


def squares(function):
    """``function`` of matrices, added to what it is given."""
    return lambda h: h + function(h.reshape(-1, 8, 8) + 4 * torch.eye(8, dtype=h.dtype)).float().mean()


def seeded(function):
    def run(h):
        torch.manual_seed(2)
        return function(h)

    return run


FUNCTIONS = {
    "rrelu": seeded(lambda h: F.rrelu(h, training=True)),
    "rrelu in place": seeded(lambda h: F.rrelu(h * 1, training=True, inplace=True)),
    "rrelu, not in training": lambda h: F.rrelu(h),
    "zeta": positive(lambda h: torch.special.zeta(h.detach() + 1, 2.0) + h),
    "bessel": lambda h: torch.special.bessel_j0(h.detach()) + h,
    "i1": torch.special.i1,
    "log_ndtr": torch.special.log_ndtr,
    "erfcx": torch.special.erfcx,
    "pdist": lambda h: h + F.pdist(h).mean() / 8,
    "histogram": lambda h: h + torch.histogram(h.detach(), 4).hist.mean() / 192,
    "complex": lambda h: torch.complex(h, h).abs(),
    "pinv": squares(torch.linalg.pinv),
    "logdet": squares(torch.logdet),
    "det": squares(lambda m: torch.det(m / 4)),
    "slogdet": squares(lambda m: torch.linalg.slogdet(m)[1]),
    "lu": squares(lambda m: torch.linalg.lu(m)[2]),
    "triangular": squares(lambda m: torch.linalg.solve_triangular(m.triu(), m, upper=True)),
    "nuclear norm": squares(lambda m: torch.norm(m, p="nuc", dim=(1, 2))),
    "antialias": lambda h: F.interpolate(
        h.reshape(-1, 1, 8, 8), size=(8, 8), mode="bilinear", antialias=True
    ).reshape(h.shape),
    "hfft": lambda h: h + torch.fft.hfft2(h.reshape(-1, 8, 8)).float().mean(),
}  # fmt: skip

# One of each kind, the rest in the long sweeps: in place, no forward, no backward, a composite, complex numbers.
ALWAYS = ("rrelu", "rrelu in place", "zeta", "i1", "pinv", "complex")
CASES = [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in FUNCTIONS]


def step(model, x, low=None):
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        out = model(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)))
    return [out, *(p.grad for p in model.parameters())]


def made(*given):
    torch.manual_seed(0)
    return Escapes(*given)


def errors(found, true):
    return [((f.double() - t.double()).norm() / (t.double().norm() + 1e-9)).item() for f, t in zip(found, true)]  # noqa: B905


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", CASES)
def test_it_runs_and_its_gradients_too(name, policy):
    true = step(made(FUNCTIONS[name]), X)
    found = step(amp_graph.convert(made(FUNCTIONS[name]), policy), X)
    assert [f.dtype for f in found] == [t.dtype for t in true]
    assert max(errors(found, true)) < 16 * torch.finfo(LOW[policy]).eps


@pytest.mark.parametrize("policy", LOW)
def test_a_checkpoint_computes_the_same_again(policy):
    def inner(function, h):
        return checkpoint(function, h, use_reentrant=False)

    true = step(made(torch.special.erfcx, inner), X)
    found = step(amp_graph.convert(made(torch.special.erfcx, inner), policy), X)
    assert max(errors(found, true)) < 16 * torch.finfo(LOW[policy]).eps


def test_autocast_of_others_is_as_it_was():
    widen_where_no_kernel("cpu", EscapedCode.is_running)
    x = torch.rand(4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.special.i1(x).dtype == torch.bfloat16
        with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
            torch.special.erfcx(x)
        with pytest.raises(RuntimeError, match="expected a tensor with 2 or more"):
            torch.linalg.pinv(x)
        assert torch.linalg.pinv(x.float()).dtype == torch.bfloat16  # of its products, which autocast lowers
    step(amp_graph.convert(made(torch.special.erfcx), "bf16"), X)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError):
        torch.special.erfcx(x)


def test_all_are_operations_that_torch_has():
    known = {op._schema.name.removeprefix("aten::") for op in widen_where_no_kernel("cpu", EscapedCode.is_running)}
    assert {name.partition(".")[0] for name in MISSING["cpu"]} - known == set()
