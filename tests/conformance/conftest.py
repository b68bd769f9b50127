"""Warnings that Dynamo gives of itself and of other packages' code while it captures the corpus."""

import pytest

IGNORED_WARNINGS = (
    r"ignore:.*Function'> should not be instantiated:DeprecationWarning",
    r"ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "conformance" in item.path.parts:
            for line in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(line))
