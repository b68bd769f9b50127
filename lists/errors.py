"""The base class of all errors, the warning, and the error of lists; every other room imports from here."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator


class AmpGraphError(Exception):
    """Anything that amp_graph refuses: what, where, what is legal, and the fix."""


def shortened(value: object, most: int = 200) -> str:
    """Return the repr of ``value``, with the middle of a long one left out."""
    try:
        text = repr(value)
    except ValueError:  # an integer with thousands of digits
        return f"a {type(value).__name__} of {value.bit_length()} bits" if isinstance(value, int) else "..."
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"


class ListError(AmpGraphError):
    """An operator list that cannot be used as written."""

    def __init__(self, what: str, *, where: str = "", legal: str = "", fix: str = "") -> None:
        fixes = ["  fix:", *(f"    {line}" for line in fix.splitlines())] if fix else []
        legals = [f"  legal: {legal}"] if legal else []
        super().__init__("\n".join([f"{where}: {what}" if where else what, *legals, *fixes]))


class Attempt:
    """A block that may fail in any way, as code of others runs in it: what it raises ends it, and is ``error``.

    ``with Attempt() as tried: ...``, and then ``if tried.error is not None``. ``passed``: errors that are raised all
    the same, as are KeyboardInterrupt and its like.
    """

    def __init__(self, *passed: type[Exception]) -> None:
        self.passed = passed
        self.error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self.passed):
            return False
        self.error = error
        return True

    @property
    def reason(self) -> str:
        """The kind of the error, and the first line of what it says."""
        return f"{type(self.error).__name__}: {first_line(self.error)}"


class Undo:
    """Calls ``undo`` if its block raises anything, KeyboardInterrupt included; what it raised goes on."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self.undo = undo

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.undo()


def first_line(error: object) -> str:
    """Return the first line of the message of ``error``."""
    return (str(error).strip().splitlines() or [""])[0]


class AmpGraphWarning(UserWarning):
    """Something did not run as requested, and the results are still correct."""


def _issue(text: str) -> None:
    """Issue ``text`` as an AmpGraphWarning at the user's line: the nearest one outside of amp_graph and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("amp_graph", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, AmpGraphWarning, stacklevel=level)


# Where warnings go, the last one now: ``amp-graph run`` takes them, as a script's filters must not make errors of them.
TAKERS: list[Callable[[str], None]] = [_issue]


def warn(text: str) -> None:
    """Warn of ``text`` at the user's line, or where a block of ``warned_once`` or a run of a script takes it."""
    TAKERS[-1](text)


@contextlib.contextmanager
def warned_once(told: set[str]) -> Iterator[None]:
    """Leave out the warnings of its block that are in ``told``, and add the others to it: a model has many graphs."""
    outer = TAKERS[-1]

    def take(text: str) -> None:
        if text not in told:
            told.add(text)
            outer(text)

    TAKERS.append(take)
    try:
        yield
    finally:
        TAKERS.pop()
