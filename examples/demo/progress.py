"""How far a training is: a bar in a terminal, elsewhere a line every few seconds.

``with steps("cnn bf16", 150) as advance: ...; advance()``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EVERY = 10.0  # seconds between two lines


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda: progress.advance(bar)


def _lines(title: str, total: int) -> Callable[[], None]:
    began = said = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, said
        done, now = done + 1, time.monotonic()
        if done in (1, total) or now - said >= EVERY:
            said = now
            print(f"{title}: step {done} of {total}, {now - began:.0f} s", file=sys.stderr, flush=True)

    return advance
