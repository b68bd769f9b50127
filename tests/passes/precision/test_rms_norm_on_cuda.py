"""RMS norms planned for CUDA: input and weight have one dtype, as torch's fused kernel wants them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers
from tests.passes.precision.test_norms_on_cuda import drawn_norms, dtypes, planned


@layers(lambda norm: dict(first=nn.Linear(32, 32), last=nn.Linear(32, 32), norms=drawn_norms(norm, 1)), seed=0)
def Heads(self, x):
    """Norms of queries, whose input comes from a product, and of a product's result that is returned."""
    h = self.norms[0](self.first(x).view(*x.shape[:-1], 4, 8))
    return self.last(h.flatten(-2))


@layers(lambda: dict(weight=nn.Parameter(torch.randn(8))))
def Written(self, x):
    """As Llama and its relatives write it."""
    wide = x.float()
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@layers(lambda: dict(weight=nn.Parameter(torch.randn(8))))
def Scaled(self, x):
    """With a weight that is computed."""
    return F.rms_norm(x, (8,), 1 + self.weight)


@layers(lambda: dict(weight=nn.Linear(8, 8)))
def Both(self, x):
    """With a weight that comes from a product."""
    return F.rms_norm(x, (8,), self.weight(x[0, 0, 0]))


NORMS = {"a module": lambda: nn.RMSNorm(8), "written out": Written, "a computed weight": Scaled, "of products": Both}
X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,accuracy=fast", "bf16,accuracy=1.5"])
@pytest.mark.parametrize("name", NORMS)
def test_no_norm_mixes_dtypes(name, policy):
    gm, _ = planned(Heads(NORMS[name]), policy, X)
    assert dtypes(gm) == [("bfloat16" if "fast" in policy else "float32",) * 3]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_without_a_weight_it_is_low(policy):
    gm, _ = planned(Heads(lambda: nn.RMSNorm(8, elementwise_affine=False)), policy, X)
    low = "bfloat16" if policy == "bf16" else "float16"
    assert dtypes(gm) == [(low, low)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["a module", "written out", "a computed weight"])
def test_errors_are_those_of_autocast(name, dtype):
    """Autocast runs the norm in float32 on CUDA since torch 2.12; on the CPU it is asked to by hand."""
    model = Heads(NORMS[name])
    gm, given = planned(model, str(dtype).replace("torch.bfloat", "bf").replace("torch.float", "fp"), X)
    exact = model.double()(X.double())
    model.float()
    norm = model.norms[0].forward

    def in_full(x):
        with torch.autocast("cpu", enabled=False):
            return norm(x.float())

    model.norms[0].forward = in_full
    with torch.autocast("cpu", dtype):
        autocast = model(X)
    (ours,) = gm(*given)
    assert (ours - exact).norm() <= 1.05 * (autocast - exact).norm()
