"""A torch newer than any that was checked is told once in a process, and what runs is right."""

import pytest
import torch

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.torch_compat import versions


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(versions, "torch_version", lambda: (2, versions.NEWEST_CHECKED[1] + 1))
    versions.tell_of_newer_torch.cache_clear()
    yield
    versions.tell_of_newer_torch.cache_clear()


def test_a_newer_torch_is_told_once(newer, recwarn):
    for _ in range(2):
        model = amp_graph.convert(torch.nn.Linear(16, 4), "bf16")
        assert model(torch.randn(3, 16)).shape == (3, 4)
    told = [str(w.message) for w in recwarn if "is newer than" in str(w.message)]
    assert len(told) == 1
    assert f"torch {torch.__version__}" in told[0]
    assert 'pip install "torch<2.' in told[0]


def test_a_checked_torch_is_not_told(monkeypatch, recwarn):
    monkeypatch.setattr(versions, "torch_version", lambda: versions.NEWEST_CHECKED)
    versions.tell_of_newer_torch.cache_clear()
    versions.tell_of_newer_torch()
    assert not recwarn.list


def test_the_warning_can_be_silenced_as_any_of_ours(newer):
    with pytest.warns(AmpGraphWarning, match="is newer than"):
        versions.tell_of_newer_torch()
