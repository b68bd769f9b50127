"""A search as one HTML page: a curve of times and errors, and the table; it fetches nothing, and has no script.

``search_page(result)`` returns the text that ``result.html(path)`` writes, in the style of the report of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_graph.report.report_html import asset, template
from amp_graph.search.trials import AUTOCAST

if TYPE_CHECKING:
    from amp_graph.search.result import SearchResult

TEMPLATES = Path(__file__).parent / "templates"
WIDTH, HEIGHT, BEYOND = 640.0, 300.0, 2.0  # of the figure; errors further beyond the budget are drawn at its edge


class Axis(NamedTuple):
    """What lies between ``low`` and ``high`` is drawn between 0 and ``length``; ``marks``: round numbers there."""

    low: float
    high: float
    length: float

    def place(self, value: float) -> float:
        """Return where ``value`` is drawn: at the end if it is beyond."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low))) * self.length

    def marks(self) -> list[tuple[float, str]]:
        """Return (place, text) of round numbers."""
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / 2))
        step = next(size * n for n in (1, 2, 5, 10) if (self.high - self.low) / (size * n) <= 6)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.place(n * step), f"{n * step:.3g}") for n in numbers]


def search_page(result: SearchResult) -> str:
    """Return ``result`` as a whole page."""
    columns, *rows = result.table()
    limit = result.goal.metric if result.by_metric else result.goal.error
    shown = [
        (number, one, one.metric if result.by_metric else one.error)
        for number, one in enumerate(result.measured, start=1)
        if math.isfinite(one.time)
    ]
    across = _axis([0.0, *(one.time for _, one, _ in shown)], WIDTH)
    up = _axis([0.0, *(min(error, limit + BEYOND * abs(limit)) for _, _, error in shown), limit], HEIGHT)
    points = [
        {"number": number, "x": across.place(one.time), "y": HEIGHT - up.place(error), "policy": one.policy,
         "kind": "own" if one.policy == AUTOCAST else "answer" if one == result.best
                 else "good" if result.goal.is_met(one) else "over",
         "told": f"{one.policy}: {one.time:.3f} of fp32's time, {error:.3g}; {result.fate(one)}"}
        for number, one, error in shown
    ]  # fmt: skip
    return str(
        template("search.html", TEMPLATES).render(
            result=result, verdict=result.verdict(), columns=columns, rows=rows, points=points, width=WIDTH,
            height=HEIGHT, across=across.marks(), up=[(HEIGHT - y, text) for y, text in up.marks()],
            limit=HEIGHT - up.place(limit), curve=_front(points), styles=asset("page.css"),
        )
    )  # fmt: skip


def _axis(values: Sequence[float], length: float) -> Axis:
    finite = [one for one in values if math.isfinite(one)]
    low, high = min(finite), max(finite)
    return Axis(low, low + 1.1 * ((high - low) or 1.0), length)


def _front(points: list[dict[str, Any]]) -> str:
    """Return the line through the policies that no other beats in both time and error."""
    kept: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda one: (one["x"], -one["y"])):
        if not kept or point["y"] > kept[-1]["y"]:
            kept.append(point)
    return " ".join(f"{one['x']:.1f},{one['y']:.1f}" for one in kept)
