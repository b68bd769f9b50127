"""The benchmark of the peak of memory: what it measures, that it goes on where it stopped, and its tables."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROW = {"before": 10, "whole": 2_000_000, "steps": 1_000_000, "allocated": 500_000}
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says what a process takes")


@pytest.fixture
def peaks():
    return importlib.import_module("peak_memory")


IN_A_PROCESS = """
import torch, peak_memory as peaks
held = peaks.resident("VmRSS")
high, _ = peaks.peak_of(lambda: torch.ones(16 << 20), 2, "cpu")
low, _ = peaks.peak_of(lambda: None, 1, "cpu")
print(held, high, low)
"""


@linux
def test_a_peak_is_seen_after_it_is_over_and_forgotten():
    """In a process of its own: in one that has run other tests, the heap has room for the tensor already."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    held, high, low = map(int, done.stdout.split())
    size = 64 << 20
    assert size * 0.95 < high - held < size * 1.5
    assert low < high - size // 2


def test_rows_that_are_there_are_not_run_again_but_for_errors(peaks, monkeypatch, tmp_path):
    ran = []
    results = iter([ROW, {"error": "killed"}, ROW, ROW])
    monkeypatch.setattr(peaks, "apart", lambda row, options: (ran.append(row[2]), next(results))[1])
    path = tmp_path / "peak.json"
    ask = ["--models", "lstm", "--optimizers", "SGD", "--ways", "autocast;fp32", "--output", str(path)]
    peaks.main(ask)
    peaks.main(ask)
    peaks.main([*ask, "--ways", "TrainStep"])
    assert ran == ["autocast", "fp32", "fp32", "TrainStep"]
    (run,) = json.loads(path.read_text())["runs"]
    assert run["results"] == {"SGD": {"lstm": {"fp32": ROW, "autocast": ROW, "TrainStep": ROW}}}
    assert "| lstm | SGD | 2 | 2 | 2 | 1.00 |" in path.with_suffix(".md").read_text()


def test_the_narrow_table(peaks):
    from peak_tables import narrow

    ours = {"whole": 1_000_000, "allocated": 400_000}
    results = {"AdamW": {"b": {"autocast": ROW}}, "SGD": {"a": {"autocast": ROW, "convert": ours}}}
    held = {"machine": peaks.machine("cpu"), "runs": [{"options": {"device": "cpu"}, "results": results}]}
    assert narrow(held).splitlines()[4:] == [
        "| b | AdamW | 2 |  |  |  |",
        "| a | SGD | 2 | 1 | 0.50 | 0.80 |",
    ]


def test_what_is_unknown_is_refused(peaks, capsys):
    for option in ("--models", "--ways"):
        with pytest.raises(SystemExit):
            peaks.parsed([option, "nothing"])
        assert "legal: " in capsys.readouterr().err


@pytest.mark.slow
@linux
def test_a_row_in_a_process_of_its_own(peaks):
    options = peaks.parsed(["--scale", "0.1", "--steps", "1"])
    found = peaks.apart(("lstm", "AdamW", "convert"), options)
    assert "error" not in found
    assert found["whole"] >= found["steps"] > 0
    assert found["allocated"] > 0
