"""A file is written whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest
from torch import nn

import amp_graph
from amp_graph.cli import command_calibrate
from amp_graph.cli import main as cli
from amp_graph.passes.native import output_file
from amp_graph.passes.native.output_file import write_atomically

FULL = OSError(errno.ENOSPC, "No space left on device")


def fails(*args, **kwargs):
    raise FULL


@pytest.fixture(params=["fsync", "replace", "open"])
def full_disk(request, monkeypatch):
    if request.param == "open":
        monkeypatch.setattr(output_file, "open", fails, raising=False)
    else:
        monkeypatch.setattr(output_file.os, request.param, fails)


def test_what_is_written(tmp_path):
    path = tmp_path / "report.html"
    for text in ("one é", "two", ""):
        write_atomically(path, text)
        assert path.read_bytes() == text.encode()
    write_atomically(str(path), b"\xff")
    assert path.read_bytes() == b"\xff"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("old", [True, False])
def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(full_disk, tmp_path, old):
    path = tmp_path / "report.html"
    if old:
        path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"] * old


def test_links_modes_and_devices_stay(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    write_atomically("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    long = tmp_path / ("x" * 250)
    write_atomically(long, "a name that has no room for more")
    assert long.read_text()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path, "text")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_full_says_so():
    with pytest.raises(OSError, match="No space"):
        write_atomically("/dev/full", "text")


# -- who writes -------------------------------------------------------------------------------------------


def test_reports_dumps_and_calibrations_stay_whole(full_disk, monkeypatch, tmp_path, capsys):
    old = {name: tmp_path / name for name in ("report.html", "dump.html", "dump.text", "machine.toml")}
    for path in old.values():
        path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        amp_graph.report(amp_graph.convert(nn.Linear(2, 2), "bf16")).html(old["report.html"])
    model = tmp_path / "given.py"
    model.write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2), torch.randn(1, 2)\n")
    for form in ("html", "text"):
        words = ["dump", f"{model}:build", "--format", form, "--output", str(old[f"dump.{form}"])]
        assert cli.main(words) == 1
        assert f"dump: cannot write {old[f'dump.{form}']}: No space left" in capsys.readouterr().err
    monkeypatch.setattr(command_calibrate, "calibrate", command_calibrate.class_of)
    assert cli.main(["calibrate", "--output", str(old["machine.toml"])]) == 1
    assert "calibrate: cannot write" in capsys.readouterr().err
    assert {path.read_text() for path in old.values()} == {"old"}
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {*old, "given.py"}
