"""Time variants side by side: one call of each in turn, so that whatever else the machine does meets all of them."""

import argparse
import statistics
from collections.abc import Callable, Mapping

WARM_UP = 3


def parser_of(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what every comparison takes: ``--rounds`` and ``--threads``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float], least: float = 0.0
) -> dict[str, list[float]]:
    """Return the seconds of a call of each variant, by round.

    The order turns with the round, so that no variant always follows the same other one. ``least``: of calls that
    take less, so many are made at once that they take about as long together.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, repeats = list(calls), 1
    for turn in range(rounds + WARM_UP):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            for _ in range(repeats):
                calls[name]()
            if turn >= WARM_UP:
                seconds[name].append((clock() - start) / repeats)
            elif turn == WARM_UP - 1:
                repeats = max(repeats, int(least / (clock() - start)))
    return seconds


def quartiles(times: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the rounds' ratios: lower, median, upper."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, baseline, strict=True)], n=4)
    return low, middle, high


def spread(times: list[float], baseline: list[float]) -> str:
    """Return the median of the rounds' ratios and their quartiles as text."""
    low, middle, high = quartiles(times, baseline)
    return f"{middle:.3f} [{low:.3f} - {high:.3f}]"
