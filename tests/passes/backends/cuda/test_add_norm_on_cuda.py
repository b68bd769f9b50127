"""Where sums and norms are planned to be one Triton kernel on CUDA, and why not elsewhere; no GPU is needed."""

import pytest
import torch

from amp_graph.passes.backends.cpu.norm.add_norm_by_torch import norm_by_torch
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cpu.norm.add_norm_kernel import residual_norm, residual_norm_backward
from amp_graph.passes.backends.cpu.norm.fuse_add_norm import FuseAddNorm
from amp_graph.passes.native import kernel_table
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.profitability import cuda_kernel_thresholds
from amp_graph.passes.profitability.cuda_kernel_thresholds import norm_kernel_is_profitable
from amp_graph.policy import Policy
from tests.passes.backends.cpu.norm.test_fuse_add_norm import PROGRAMS, graphs, reasons
from tests.passes.graphs import BF16, passes_for, run_step

KERNEL, POLICY = "add_norm on cuda", "bf16,device=cuda"


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "FEWEST_NORMED", 1)
    monkeypatch.setattr(cuda_kernel_thresholds, "NARROWEST", 1)
    monkeypatch.setitem(kernel_table._loaders, KERNEL, lambda low: None)


def calls(gm):
    return [n for n in gm.graph.nodes if n.target is add_norm]


# How many norms become one pass where CUDA's lists plan them, of pre_norm, post_norm, ..., rms_norms.
FUSED = dict(zip(PROGRAMS, (2, 2, 1, 2, 1, 1, 2), strict=True))


@pytest.mark.parametrize("function", PROGRAMS)
@pytest.mark.compiled
def test_what_is_planned_for_cuda(function):
    ours, plain, given, result = graphs(function, POLICY)
    assert len(calls(ours)) == len(result.changes) == FUSED[function]
    a, b = run_step(ours, given), run_step(plain, given)
    for x, y in zip(a.outputs + a.grads, b.outputs + b.grads, strict=True):
        assert (x is None) is (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            assert (x.double() - y.double()).norm() <= 0.01 * y.double().norm() + 1e-6


def test_without_a_kernel_the_norm_is_torchs_with_the_reason(monkeypatch):
    def loader(low):
        raise CompilerError("no Triton kernel: compute capability 7.5 is below 8.0\n  more")

    monkeypatch.setitem(kernel_table._loaders, KERNEL, loader)
    ours, _, _, result = graphs(PROGRAMS[0], POLICY)
    assert not calls(ours)
    assert reasons(result) == ["no Triton kernel: compute capability 7.5 is below 8.0"] * 2


def test_small_and_narrow_norms_are_left_alone(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "NARROWEST", 17)
    ours, _, _, result = graphs(PROGRAMS[0], POLICY)
    assert not calls(ours)
    assert reasons(result) == ["torch's operations are as fast for (6, 16) on cuda"] * 2


def test_when_it_is_profitable(monkeypatch):
    monkeypatch.undo()
    assert norm_kernel_is_profitable("cuda", 8 * 1024 * 1024, 1024)
    assert norm_kernel_is_profitable("cuda", 64 * 512 * 768, 768)
    assert not norm_kernel_is_profitable("cuda", 32 * 128 * 256, 256)
    assert not norm_kernel_is_profitable("cuda", 1 << 24, 64)
    assert not norm_kernel_is_profitable("cuda", 1 << 24, 32768), "a program holds a row in registers"
    assert not norm_kernel_is_profitable("cpu", 1 << 24, 1024)


def test_in_which_pipelines_it_is():
    def has(**mode):
        return [p.device for p in passes_for(Policy.parse("bf16"), "cuda", **mode) if isinstance(p, FuseAddNorm)]

    assert has(eager=True) == ["cuda"]
    assert has() == [], "Inductor fuses norms itself"


# -- a device without a kernel: a model planned elsewhere, or moved ------------------------------------------------


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.compiled
def test_torch_computes_the_same_as_the_c_kernel(centered, monkeypatch):
    x, weight = torch.randn(5, 24), torch.randn(24)
    given = (x, x.cos().to(BF16), weight, weight + 1, 24, 1e-5, BF16, True, True, centered)
    made = residual_norm(*given)
    again = ([made[2], made[3]], x, made[1], made[0], weight, 24, BF16, True, True, True, True, centered)
    grads = residual_norm_backward(*again)

    def refuses(low):
        raise CompilerError("none")

    monkeypatch.setitem(kernel_table._loaders, "add_norm on cpu", refuses)
    for a, b in zip([*made, *grads], [*residual_norm(*given), *residual_norm_backward(*again)], strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype == BF16 else 1e-5, atol=1e-5)


def test_an_unknown_device_is_torchs():
    x = torch.empty(5, 24, device="meta")
    given = (x, None, None, None, 24, 1e-5, BF16, True, True, True)
    assert [t.shape for t in residual_norm(*given)] == [t.shape for t in norm_by_torch(*given)]
