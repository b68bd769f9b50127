"""Tests with the real packages, run by ``make test-integrations``; here only ours is strict about warnings."""

import importlib.util
import os

import pytest

from tests.step.processes import processes

ranks = pytest.fixture(scope="module")(processes)


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items):
    for item in items:
        if "integrations" in item.path.parts and item.get_closest_marker("needs"):
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error::amp_graph.errors.AmpGraphWarning"))


@pytest.fixture(autouse=True)
def _needs(request):
    """Skip a test whose package is missing, and name the package."""
    for mark in request.node.iter_markers("needs"):
        for name in mark.args:
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is missing; fix: pip install 'amp-graph[integrations]'")


@pytest.fixture(autouse=True)
def _same_environment():
    """Undo what Lightning's DDP leaves: LOCAL_RANK, with which later trainings of transformers use DDP as well."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
