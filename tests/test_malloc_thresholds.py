"""Freed memory is used again after ``raise_malloc_thresholds``; what it cannot do it says."""

import platform
import subprocess
import sys

import pytest

import amp_graph
from amp_graph import malloc_thresholds
from amp_graph.errors import AllocatorError, AmpGraphError

# Page faults of copying 64 MiB, once the heap has settled: what is small may be put into the hole that a copy left, and
# the next one is then made behind it. In a process of its own, whose allocator may be changed.
COPY = """
import resource, sys, torch
import amp_graph
torch.set_num_threads(1)
if sys.argv[1] == "raised":
    assert amp_graph.memory.raise_malloc_thresholds()
x = torch.ones(1 << 24)
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x.clone()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", COPY, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
def test_a_large_tensor_is_made_from_memory_that_was_freed():
    assert faults("as it is") > 100  # of 2 MiB, where the system gives such pages
    assert faults("raised") < 20


def test_both_thresholds_are_set(monkeypatch):
    calls = []
    monkeypatch.setattr(malloc_thresholds, "_mallopt", lambda: lambda which, to: calls.append((which, to)) or 1)
    assert amp_graph.memory.raise_malloc_thresholds(bytes=12345) is True
    assert calls == [(-3, 12345), (-1, -1)]  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def test_a_library_that_would_not_or_has_none_is_told(monkeypatch):
    monkeypatch.setattr(malloc_thresholds, "_mallopt", lambda: lambda which, to: 0)
    assert amp_graph.memory.raise_malloc_thresholds() is False
    monkeypatch.setattr(malloc_thresholds, "_mallopt", lambda: None)
    assert amp_graph.memory.raise_malloc_thresholds() is False


@pytest.mark.parametrize("given", [0, -1, 2**31, 1.5, True, "1G"])
def test_no_number_of_bytes_is_refused(given, monkeypatch):
    monkeypatch.setattr(malloc_thresholds, "_mallopt", lambda: pytest.fail("called"))
    with pytest.raises(AllocatorError, match="legal: a whole number from 1 to") as caught:
        amp_graph.memory.raise_malloc_thresholds(bytes=given)
    assert isinstance(caught.value, AmpGraphError)
    assert isinstance(caught.value, ValueError)
    assert "fix:" in str(caught.value)
