"""A search as one HTML page: a curve of times and errors, and the table; it fetches nothing, and has no script.

``search_page(result)`` returns the text that ``result.html(path)`` writes, in the style of the report of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from amp_graph.report.report_html import asset, template
from amp_graph.search.trials import AUTOCAST

if TYPE_CHECKING:
    from amp_graph.search.result import SearchResult

WIDTH, HEIGHT, BEYOND = 640.0, 300.0, 2.0  # of the figure; errors further beyond the budget are drawn at its edge


def search_page(result: SearchResult) -> str:
    """Return ``result`` as a whole page."""
    columns, *rows = result.table()
    limit = result.goal.metric if result.by_metric else result.goal.error
    shown = [
        (number, one, one.metric if result.by_metric else one.error)
        for number, one in enumerate(result.measured, start=1)
        if math.isfinite(one.time)
    ]
    across, columns_at = _axis([0.0, *(one.time for _, one, _ in shown)], WIDTH)
    up, rows_at = _axis([0.0, *(min(error, limit + BEYOND * abs(limit)) for _, _, error in shown), limit], HEIGHT)
    points = [
        {"number": number, "x": across(one.time), "y": HEIGHT - up(error), "policy": one.policy,
         "kind": "own" if one.policy == AUTOCAST else "answer" if one == result.best
                 else "good" if result.goal.is_met(one) else "over",
         "told": f"{one.policy}: {one.time:.3f} of fp32's time, {error:.3g}; {result.fate(one)}"}
        for number, one, error in shown
    ]  # fmt: skip
    return str(
        template("search.html").render(
            result=result, verdict=result.verdict(), columns=columns, rows=rows, points=points, width=WIDTH,
            height=HEIGHT, across=columns_at, up=[(HEIGHT - y, text) for y, text in rows_at],
            limit=HEIGHT - up(limit), curve=_front(points), styles=asset("page.css"),
        )
    )  # fmt: skip


def _axis(values: Sequence[float], length: float) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Return what places a number on an axis for ``values``, and round numbers there, (place, text).

    A place is between 0 and ``length``: what is beyond the axis is at its end.
    """
    finite = [one for one in values if math.isfinite(one)]
    low = min(finite)
    width = 1.1 * ((max(finite) - low) or 1.0)

    def place(value: float) -> float:
        return min(1.0, max(0.0, (value - low) / width)) * length

    size = 10.0 ** math.floor(math.log10(width / 2))
    step = next(size * n for n in (1, 2, 5, 10) if width / (size * n) <= 6)
    marks = (n * step for n in range(math.ceil(low / step), math.floor((low + width) / step) + 1))
    return place, [(place(mark), f"{mark:.3g}") for mark in marks]


def _front(points: list[dict[str, Any]]) -> str:
    """Return the line through the policies that no other beats in both time and error."""
    kept: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda one: (one["x"], -one["y"])):
        if not kept or point["y"] > kept[-1]["y"]:
            kept.append(point)
    return " ".join(f"{one['x']:.1f},{one['y']:.1f}" for one in kept)
