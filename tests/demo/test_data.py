"""The demo's texts: read until there is enough, and cut for training and for evaluation."""

import sysconfig

import pytest

from examples.demo.data import MissingData, SourceText


def test_so_much_text_is_read_as_is_asked():
    text = SourceText.load(8, characters=120_000)
    assert len(text.ids) == 108_000
    assert len(text.held) == 12_000


def test_a_python_without_its_library_is_told(monkeypatch, tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MissingData, match="holds no Python source text"):
        SourceText.load(8)
