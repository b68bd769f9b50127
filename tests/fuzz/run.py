"""Run one subject over many inputs: count what is taken and refused, and keep what is neither, or takes too long."""

import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.fuzz.subjects import Subject

LIMIT = 1.0  # seconds of the processor that one input may take
LONGEST = 20_000  # characters of an error's message


class TooLong(BaseException):
    """An input that takes longer than the limit."""


@dataclass
class Outcome:
    """What became of the inputs of one subject."""

    taken: int = 0
    refused: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.taken} taken, {self.refused} refused, {len(self.faults)} faults, at most {self.slowest:.2f} s"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong in here after so many seconds of the processor: in the main thread, where signals come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(subject: Subject, count: int, seed: int) -> Outcome:
    """Try ``count`` inputs; the same ones for a seed, each by its number."""
    found = Outcome()
    subject.prepare()
    for number in range(count):
        given = subject.make(random.Random(f"{seed} {number}"))
        began = time.process_time()
        what = _tried(subject, given, found)
        taken = time.process_time() - began
        found.slowest = max(found.slowest, taken)
        if not what and taken > LIMIT:
            what = f"takes {taken:.1f} s"
        if what:
            found.faults.append(f"seed {seed}, number {number}: {what}\n    {_shown(given)}")
    return found


def _tried(subject: Subject, given: object, found: Outcome) -> str:
    """Return what is wrong with how ``given`` is taken or refused."""
    try:
        with warnings.catch_warnings(), limited(LIMIT):
            warnings.simplefilter("error")
            subject.call(given)
    except subject.promised as error:
        found.refused += 1
        return f"a message of {len(str(error))} characters" if len(str(error)) > LONGEST else ""
    except TooLong:
        return f"takes over {LIMIT} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    found.taken += 1
    return ""


def _shown(given: object) -> str:
    try:
        text = repr(given)
    except ValueError:  # a number of thousands of digits
        text = f"a {type(given).__name__}"
    return text if len(text) < 600 else f"{text[:400]} ... {text[-200:]}"
