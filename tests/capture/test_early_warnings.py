"""Warnings that come before the harm: fp16 without a scaler, no compiler."""

import gc

import pytest
import torch
from torch.nn import functional as F

import amp_graph
from amp_graph.capture import diagnostics
from amp_graph.capture.diagnostics import ELSE, fix_of
from amp_graph.errors import AmpGraphWarning
from tests.warned import heard

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


@pytest.fixture
def _on(monkeypatch):
    monkeypatch.setattr("amp_graph.capture.diagnostics.LARGEST_UNSCALED", 1.0)
    gc.collect()  # of scalers of other tests


@pytest.fixture
def _tells_of_kernels(monkeypatch):
    monkeypatch.setattr(diagnostics, "WARNS", True)
    monkeypatch.setattr(diagnostics, "_warned", set())


def said(policy, *, steps=2, scale=1.0, scaler=None):
    """Return what is said while a model trains."""
    model = amp_graph.convert(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)), policy
    )
    with heard() as found:
        for _ in range(steps):
            loss = F.cross_entropy(model(X), Y) * scale
            (loss if scaler is None else scaler.scale(loss)).backward()
    return [str(one.message) for one in found if issubclass(one.category, AmpGraphWarning)]


@pytest.mark.usefixtures("_on")
def test_fp16_without_a_scaler_is_said_once_at_the_first_backward():
    (one,) = said("fp16")
    assert one.startswith("amp_graph: Sequential trains in fp16, and nothing in this process scales losses")
    assert "fix:   scaler = amp_graph.GradScaler()" in one
    assert said("fp16", steps=1, scaler=torch.amp.GradScaler("cpu", enabled=False)) == [one]


@pytest.mark.usefixtures("_on")
@pytest.mark.parametrize("scaler", [lambda: torch.amp.GradScaler("cpu"), amp_graph.GradScaler])
def test_nothing_is_said_with_a_scaler_or_a_scale_by_hand_or_in_bf16(scaler):
    assert said("fp16", scaler=scaler()) == []
    assert said("fp16", scale=1024.0) == []
    assert said("bf16") == []


@pytest.mark.usefixtures("_tells_of_kernels")
@pytest.mark.parametrize("way", ["compiler", pytest.param("cache", marks=pytest.mark.compiled)])
def test_missing_kernels_are_said_once_with_the_fix(way, monkeypatch, tmp_path):
    if way == "compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
        monkeypatch.setenv("AMP_GRAPH_CACHE", str(tmp_path))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("AMP_GRAPH_CACHE", str(tmp_path / "file" / "cache"))
    from amp_graph.passes.backends.cpu.attention import attention_kernel
    from amp_graph.passes.native import jit_compiler

    monkeypatch.setattr(jit_compiler, "load", jit_compiler.load.__wrapped__)  # not what other tests have loaded
    assert jit_compiler.load_if_possible(attention_kernel.SOURCE) is None
    found = [*said("bf16", steps=1), *said("bf16", steps=1)]
    reason = "no C compiler: no-such-compiler not found" if way == "compiler" else str(tmp_path / "file")
    assert reason in found[0]
    assert len([one for one in found if "torch's kernels run in place of compiled ones (" in one]) == 1
    assert all(
        "fix:   install gcc or clang, or set CC; a folder that can be written: AMP_GRAPH_CACHE=" in one for one in found
    )


def test_fixes_follow_what_dynamo_said():
    assert "is_causal=True" in fix_of("model.py:3, in forward: Data-dependent branching")
    assert fix_of("something else") == ELSE
