"""What the exit report says of worker processes: a forked one has the models that were converted before."""

import multiprocessing as mp
from multiprocessing.process import BaseProcess

import pytest

from amp_graph.run.exit_report import Workers

WRITTEN = "left as written: what 2 worker processes train, started at "
FORKED = "not reported: what 2 worker processes train, forked at "


@pytest.mark.parametrize(("method", "told"), [("spawn", WRITTEN), ("forkserver", WRITTEN), ("fork", FORKED)])
def test_it_depends_on_how_they_start(method, told, monkeypatch):
    monkeypatch.setattr(BaseProcess, "start", lambda self: None)
    workers = Workers()
    for _ in range(2):
        mp.get_context(method).Process(target=print).start()
    (line,) = workers.lines()
    assert line.startswith(told)
    assert "test_worker_processes.py:" in line
