"""Ranks, for all tests of steps."""

import pytest

from tests.step.processes import processes

ranks = pytest.fixture(scope="package")(processes)
