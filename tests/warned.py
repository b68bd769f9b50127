"""Warnings of a call: left out, made errors, or heard, whatever the filters around it are."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from amp_graph.errors import AmpGraphWarning


def _by(action: str) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def filtered(category: type[Warning] = AmpGraphWarning) -> Iterator[None]:
        """Do so with warnings of ``category``."""
        with warnings.catch_warnings():
            warnings.simplefilter(action, category)
            yield

    return filtered


without_warnings, warnings_are_errors = _by("ignore"), _by("error")


@contextmanager
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """Collect all warnings, also those that were said before."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said
