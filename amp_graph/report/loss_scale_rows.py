"""The history of a loss scale, as a report shows it: its steps, and the skipped ones with their causes.

Before: ``[{"step": 7, "scale": 32768.0, "skipped": True, "cause": "layer.3: inf"}]``. After: a ``ScaleRow`` for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amp_graph.errors import AmpGraphError

WIDTH, HEIGHT = 1000, 160  # of the chart, in its own units


@dataclass(frozen=True)
class ScaleRow:
    """One step: its loss scale, whether its update was skipped, and the cause where it is known."""

    step: int
    scale: float
    skipped: bool = False
    cause: str = ""


def scale_rows(given: Iterable[Mapping[str, Any]]) -> tuple[ScaleRow, ...]:
    """Return the rows of a history, in the order of their steps; AmpGraphError for a row without step or scale."""
    rows = []
    for row in given:
        try:
            rows.append(
                ScaleRow(
                    int(row["step"]), float(row["scale"]), bool(row.get("skipped", False)), str(row.get("cause") or "")
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise AmpGraphError(
                f"report: {row!r} is not a row of a loss scale's history\n"
                "  legal: a dict of step and scale, and of skipped and cause where they are known\n"
                '  fix:   amp_graph.report(model, loss_scale=[{"step": 0, "scale": 65536.0, "skipped": False}])'
            ) from error
    return tuple(sorted(rows, key=lambda row: row.step))


def chart_of(rows: tuple[ScaleRow, ...]) -> dict[str, Any] | None:
    """Return the chart of a history: a line over steps, on a logarithmic axis, and the points of skipped steps.

    None without a positive finite scale.
    """
    drawn = [row for row in rows if row.scale > 0 and math.isfinite(row.scale)]
    if not drawn:
        return None
    least, most = min(row.scale for row in drawn), max(row.scale for row in drawn)
    first, last = drawn[0].step, drawn[-1].step
    points = [_point(row, least, most, first, last) for row in drawn]
    line = f"M{points[0][0]:.1f} {points[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
    skipped = [(*at, row) for at, row in zip(points, drawn, strict=True) if row.skipped]
    return {"line": line, "skipped": skipped, "least": least, "most": most, "first": first, "last": last}


def _point(row: ScaleRow, least: float, most: float, first: int, last: int) -> tuple[float, float]:
    across = (row.step - first) / (last - first or 1)
    up = (math.log2(row.scale) - math.log2(least)) / (math.log2(most / least) or 1) if most > least else 0.5
    return WIDTH * across, HEIGHT * (1 - up)
