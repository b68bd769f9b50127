"""Warnings of a call: left out, made errors, or heard, whatever the filters around it are."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from amp_graph.errors import AmpGraphWarning


@contextmanager
def without_warnings(category: type[Warning] = AmpGraphWarning) -> Iterator[None]:
    """Say nothing of ``category``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield


@contextmanager
def warnings_are_errors(category: type[Warning] = AmpGraphWarning) -> Iterator[None]:
    """Raise the first warning of ``category``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        yield


@contextmanager
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """Collect all warnings, also those that were said before."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said
