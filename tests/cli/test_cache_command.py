"""``amp-graph cache`` and ``amp-graph completion``."""

import json
import os

import pytest

from amp_graph.cli.main import main

KEY, DIGEST = "kernel-" + "0a" * 12, "1b" * 16


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache of one library, and files of somebody else."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for name in (f"{KEY}.{DIGEST}.so", "notes.txt", "other.so"):
        (folder / name).write_bytes(b"x" * 2048)
    monkeypatch.setenv("AMP_GRAPH_CACHE", str(folder))
    return folder


def test_list_shows_the_libraries_alone(kept, capsys):
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{kept}: 1 libraries, 2 KiB")
    assert "other.so" not in out
    assert main(["cache", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["library"] for row in told["libraries"]] == [f"{KEY}.{DIGEST}.so"]


def test_clear_removes_libraries_and_nothing_else(kept, capsys):
    assert main(["cache", "clear"]) == 0
    assert "removed 1 libraries, 2 KiB" in capsys.readouterr().out
    assert sorted(os.listdir(kept)) == ["notes.txt", "other.so"]
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 0


def test_a_folder_that_is_missing_is_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AMP_GRAPH_CACHE", str(tmp_path / "nothing"))
    assert main(["cache", "list"]) == 0
    assert "0 libraries" in capsys.readouterr().out
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_others_may_write_to_is_refused(kept, capsys):
    kept.chmod(0o777)
    assert main(["cache", "clear"]) == 1
    assert "may be written to by others" in capsys.readouterr().err
    assert len(os.listdir(kept)) == 3


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_prints_a_script_with_every_command(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for word in ("dump", "explain", "cache", "--policy", "clear"):
        assert word in out
