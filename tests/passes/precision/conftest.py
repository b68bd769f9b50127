"""The machine that a test plans for."""

from dataclasses import replace

import pytest

from tests.passes.planning import machine


@pytest.fixture
def on(monkeypatch):
    """Plan for one of the machines that come with the package, with the rates given."""

    def plan_for(name, **rates):
        for room in ("passes.precision.plan_precision", "policy"):
            monkeypatch.setattr(f"amp_graph.{room}.machine_for", lambda device: replace(machine(name), **rates))

    return plan_for
