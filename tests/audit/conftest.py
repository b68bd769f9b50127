"""The machine for which the audit's tests predict times: a CPU with matrix units, whatever runs them."""

import pytest

from amp_graph.passes.precision.machine_rates import MACHINES


@pytest.fixture(autouse=True)
def _machine_of_these_tests(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / "cpu_amx.toml"))
