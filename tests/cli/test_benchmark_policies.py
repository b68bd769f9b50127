"""Steps are timed by any clock, also by one that advances seldom."""

import itertools
import time

import pytest
import torch
from torch import nn

from amp_graph.cli import benchmark_policies
from amp_graph.cli.benchmark_policies import train
from amp_graph.policy import Policy


@pytest.mark.parametrize("every", [1, 4, 7])
def test_a_coarse_clock_of_the_process_divides_by_no_zero(monkeypatch, every):
    """On Windows it advances by 16 ms, and elsewhere seldom where a timer of the process is set."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: next(ticks) // every * 0.016)
    monkeypatch.setattr(benchmark_policies, "WARM_UP", 0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    one, other = train(model, lambda m: m(x).sum(), [Policy.parse("bf16,level=O0")] * 2, (), rounds=3)
    assert all(seconds > 0 for seconds in (*one.seconds, *other.seconds))
    assert 0.2 < one.speed_to(other) < 5
