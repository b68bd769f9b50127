"""What Inductor leaves out of the code of a whole step, and when a step's calls are compiled, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.linear.amx_gemm import OPS
from amp_graph.passes.backends.inductor import compile as inductor_compile
from amp_graph.passes.backends.inductor.compile import options_of_step
from amp_graph.passes.torch_compat.fake import make_fx

CHECKS = {"size_asserts": False, "alignment_asserts": False}
X, W = torch.randn(8, 32), torch.randn(16, 32)


def options(function, *given):
    return options_of_step(make_fx(function, tracing_mode="fake")(*given))


def test_a_small_step_of_torchs_operators_is_called_from_cpp():
    assert options(lambda x, w: F.linear(x, w).relu().sum(), X, W) == CHECKS | {"cpp_wrapper": True}


def test_operators_of_ours_are_called_from_python():
    given = X.bfloat16(), W.bfloat16().t()
    assert options(lambda x, w: OPS.amx_product(x, w, None, False), *given) == CHECKS


def test_operators_of_others_are_looked_at():
    with torch.library._scoped_library("test_step_options", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("test_step_options::twice", torch.empty_like, lib=library)
        assert options(lambda x, w: torch.ops.test_step_options.twice(F.linear(x, w)), X, W) == {}


@pytest.mark.parametrize("limit", ["MOST_FLOPS", "MOST_ELEMENTS"])
def test_a_step_that_takes_its_time_is_called_from_python(limit, monkeypatch):
    counted = {"MOST_FLOPS": 2 * 8 * 16 * 32, "MOST_ELEMENTS": 8 * 16 + 16 * 32}[limit]  # the product; and a transpose
    monkeypatch.setattr(inductor_compile, limit, counted)
    assert options(lambda x, w: F.linear(x, w), X, W) == CHECKS | {"cpp_wrapper": True}
    monkeypatch.setattr(inductor_compile, limit, counted - 1)
    assert options(lambda x, w: F.linear(x, w), X, W) == CHECKS


def trained(compile):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = amp_graph.TrainStep(model, lambda y: y.square().mean(), optimizer, "bf16", compile=compile)
    losses = [step(X) for _ in range(5)]
    return torch.stack(losses), [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:CUTLASS backend is not supported:UserWarning",  # a CUDA build of torch 2.12, also without a GPU
)
def test_a_step_that_is_called_from_cpp_trains_as_the_eager_one():
    from torch._inductor.utils import run_and_get_code

    caches = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(fx_graph_cache=False), caches:
        (losses, weights), (code,) = run_and_get_code(trained, "inductor")
    assert "CppWrapperCodeCache" in code
    assert "assert_size_stride(" not in code
    wanted, others = trained("eager")
    assert torch.allclose(losses, wanted, rtol=1e-2, atol=0)
    for got, other in zip(weights, others, strict=True):
        assert (got - other).norm() <= 1e-2 * other.norm()
