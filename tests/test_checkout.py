"""The tests run the code of the checkout that they are in, or do not run."""

from pathlib import Path

import pytest

from tests.conftest import PACKAGES, folder_of, packages_elsewhere


def test_the_code_is_that_of_this_checkout():
    assert packages_elsewhere(PACKAGES, folder_of) == ""


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("place", [Path("/another/checkout"), None])
def test_code_of_another_checkout_is_named_with_the_fix(name, place):
    told = packages_elsewhere(PACKAGES, lambda one: place if one == name else PACKAGES[one])
    first, line, fix = told.splitlines()
    assert "would run the code of another one" in first
    assert line == f"  {name} comes from {place}, and not from {PACKAGES[name]}"
    assert fix.startswith("  fix:   ")
    assert fix.endswith(f"-m pip install --no-deps -e {PACKAGES['amp_graph'].parent}")
