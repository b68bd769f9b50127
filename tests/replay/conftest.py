"""Models on the CPU that are recorded by the stand-in, for all tests of recordings."""

import pytest

from tests.replay import stand_in


@pytest.fixture
def recorders(monkeypatch):
    return stand_in.install(monkeypatch).made
