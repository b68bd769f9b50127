"""Where a loss is planned to be Triton's on CUDA, and why it is not elsewhere; no GPU and no triton is needed."""

import subprocess
import sys

import pytest
import torch

from amp_graph import Policy
from amp_graph.passes.backends.cpu.loss.fuse_cross_entropy import FuseCrossEntropy
from amp_graph.passes.native import kernel_table, triton_loader
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.pipeline import pipeline
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.profitability import cuda_kernel_thresholds
from amp_graph.passes.profitability.cuda_kernel_thresholds import cross_entropy_kernel_is_profitable
from tests.passes.backends.cpu.loss.test_fuse_cross_entropy import FOUND, LEFT, close, passed
from tests.passes.graphs import BF16, FP16, passes_for, run_step

KERNEL = "cross_entropy on cuda"


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "FEWEST_LOGITS", 1)
    monkeypatch.setattr(cuda_kernel_thresholds, "FEWEST_ROWS", 1)
    monkeypatch.setitem(kernel_table._loaders, KERNEL, lambda low: None)


def planned(function, monkeypatch, device="cuda"):
    """The same tests as of the CPU's pass, planned for another device."""
    monkeypatch.setattr("tests.passes.backends.cpu.loss.test_fuse_cross_entropy.FuseCrossEntropy", lambda: one)
    one = FuseCrossEntropy(device)
    return passed(function)


@pytest.mark.parametrize("name", ["nanogpt", "hugging face", "shifted", "a module, weighted and smoothed"])
def test_what_is_planned_for_cuda_computes_the_same(name, monkeypatch):
    plain, found, given, result = planned(FOUND[name], monkeypatch)
    assert [c.action for c in result.changes] == ["in parts"]
    a, b = run_step(found, given), run_step(plain, given)
    assert all(map(close, a.outputs + a.grads, b.outputs + b.grads))


@pytest.mark.parametrize("name", ["images", "labels that are chances", "written in place"])
def test_what_no_device_fuses(name, monkeypatch):
    _, _, _, result = planned(LEFT[name], monkeypatch)
    assert not result.changes
    assert result.skips


def refuses(why):
    def loader(low):
        raise CompilerError(f"no Triton kernel: {why}\n  more")

    return loader


def test_without_a_kernel_the_loss_is_torchs_with_the_reason(monkeypatch):
    monkeypatch.setitem(kernel_table._loaders, KERNEL, refuses("the package triton is not installed"))
    _, _, _, result = planned(FOUND["nanogpt"], monkeypatch)
    assert [s.reason for s in result.skips] == ["no Triton kernel: the package triton is not installed"]
    assert not result.changes


def test_small_losses_are_left_alone(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "FEWEST_LOGITS", 1 << 23)
    _, _, _, result = planned(FOUND["nanogpt"], monkeypatch)
    assert "as fast for 36 x 50 logits in torch.bfloat16 on cuda" in result.skips[0].reason


def test_when_it_is_profitable(monkeypatch):
    monkeypatch.undo()
    for dtype in (BF16, FP16):
        assert cross_entropy_kernel_is_profitable("cuda", dtype, 8192, 50257)
        assert not cross_entropy_kernel_is_profitable("cuda", dtype, 64, 262144), "a program takes a row"
        assert not cross_entropy_kernel_is_profitable("cuda", dtype, 65536, 10)
        assert not cross_entropy_kernel_is_profitable("cpu", dtype, 8192, 50257)
    assert not cross_entropy_kernel_is_profitable("cuda", torch.float32, 8192, 50257)


def test_in_which_pipelines_it_is():
    def has(device, **mode):
        return [p for p in passes_for(Policy.parse("bf16"), device, **mode) if isinstance(p, FuseCrossEntropy)]

    assert [p.device for p in has("cuda", eager=True)] == ["cuda"]
    assert [p.device for p in has("cpu", eager=True)] == ["cpu"]
    assert not has("cuda"), "Inductor fuses the loss itself"
    autocasts = Policy.parse("bf16,lists=autocast_cuda").pipeline_options("cuda", eager=True)
    assert not any(isinstance(p, FuseCrossEntropy) for p in pipeline(Phase.CAPTURED, autocasts))


# -- standing aside --------------------------------------------------------------------------------------------


def test_why_there_is_no_triton(monkeypatch):
    monkeypatch.delenv(triton_loader.VARIABLE, raising=False)
    monkeypatch.setattr(triton_loader, "_is_installed", lambda: False)
    assert triton_loader.why_no_triton() == "the package triton is not installed"
    monkeypatch.setattr(triton_loader, "_is_installed", lambda: True)
    monkeypatch.setattr(triton_loader, "interprets", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_loader.why_no_triton() == "", "a graph may be planned for another machine"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (7, 5)][i])
    assert "AMP_GRAPH_TRITON=1 switches them on" in triton_loader.why_no_triton(), "no GPU has run them yet"
    monkeypatch.setenv(triton_loader.VARIABLE, "1")
    assert triton_loader.why_no_triton() == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    assert triton_loader.why_no_triton() == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "NVIDIA" in triton_loader.why_no_triton()


def test_a_kernel_that_fails_is_tried_once(monkeypatch):
    monkeypatch.setattr(triton_loader, "_failed", {})
    calls = []
    monkeypatch.setattr(triton_loader.importlib, "import_module", lambda name: calls.append(name) or {}[name])
    for _ in range(2):
        with pytest.raises(CompilerError, match="no Triton kernel: KeyError: 'm'"):
            triton_loader.launch("m", "kernel", 1, (torch.ones(1),))
    assert calls == ["m"]
    assert triton_loader.why_failed() == {"m": "KeyError: 'm'"}
    with pytest.raises(CompilerError, match="too many"):
        triton_loader.launch("other", "kernel", 2**31, (torch.ones(1),))
    assert "other" not in triton_loader.why_failed()


IMPORTS = """
import sys
import torch  # looks for triton itself from 2.14 on
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton"):
            raise ImportError(f"{name} is missing")
sys.meta_path.insert(0, Refuses())
import amp_graph.passes.pipeline_table
assert not [name for name in sys.modules if name.endswith("_source")]
"""


def test_no_source_of_a_kernel_is_imported_with_the_passes():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
