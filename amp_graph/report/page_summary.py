"""The figures on the first screen of a report's page: what is low, casts, speed, memory, the loss scale's history.

Before: a ``Report``. After: ``{"flops": {"low": 9.6e9, "all": 9.7e9}, "casts": {...}, "speeds": [...], ...}``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_graph.errors import AmpGraphError
from amp_graph.report.records import WEIGHT, GraphReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

LOW = ("bf16", "f16")
FULL, AUTOCAST, OURS = "fp32", "torch.autocast", "amp_graph"
AS_WRITTEN = "as written"  # of a script, in its own precision


def summary_of(report: Report) -> dict[str, Any]:
    """Return the figures of all graphs together.

    ``flops``, ``bytes``, ``operations``: how much of them is ``low``, of ``all``. ``casts``: see ``_casts``;
    ``speeds``: see ``_speeds``; ``machine``: what the predictions are for. ``written``: bytes of activations,
    ``captured_bytes``: as captured.
    """
    nodes = [node for graph in report.graphs for node in graph.nodes]
    planned = [node for graph in report.graphs for node in graph.operations]
    sizes = [item for graph in report.graphs for item in graph.bytes.items()]
    written = sum(size for _, size in sizes)
    low_flops = sum(node.flops for node in nodes if node.precision == "low")
    return {
        "flops": {"low": low_flops, "all": sum(node.flops for node in nodes)},
        "bytes": {"low": sum(size for name, size in sizes if name in LOW), "all": written},
        "operations": {"low": sum(node.precision == "low" for node in planned), "all": len(planned)},
        "casts": _casts(report.graphs),
        "speeds": _speeds(report),
        "machine": next((graph.predicted.machine for graph in report.graphs if graph.predicted), ""),
        "memory": report.memory,
        "written": written,
        "captured_bytes": sum(graph.captured_bytes for graph in report.graphs),
    }


def _casts(graphs: tuple[GraphReport, ...]) -> dict[str, Any]:
    """Return numbers of casts: ``captured`` are the user's own, of which ``own`` are still in the rewritten graphs.

    ``kept``: those of ``weights`` whose result stays between calls. ``autocast``: those of ``torch.autocast`` in the
    graphs as captured, of activations and of weights; None where none was counted, and ``why_not`` says why.
    """
    own = captured = 0
    for graph in graphs:
        theirs = {node.name for node in graph.captured if node.kind == "cast"}
        captured += len(theirs)
        own += sum(node.name in theirs and node.kind != "cast" for node in graph.nodes)
    casts = [cast for graph in graphs for cast in graph.casts]
    weights, found = sum(cast.of == WEIGHT for cast in casts), [g.autocast for g in graphs if g.autocast is not None]
    why_not = next((one.why_not for one in found if one.why_not), "")
    counts = [sum(one.activations for one in found), sum(one.weights for one in found)]
    return {
        "captured": captured, "own": own, "after": own + len(casts),
        "activations": len(casts) - weights, "weights": weights, "kept": sum(cast.kept for cast in casts),
        "autocast": counts if found and not why_not else None, "why_not": why_not,
    }  # fmt: skip


def _speeds(report: Report) -> list[dict[str, Any]]:
    """Return a row for each precision: fp32 first, then torch.autocast, then what runs here.

    ``predicted`` and ``measured`` are speeds as multiples of fp32's (measured: or else of the script's as written):
    above 1 is faster. ``seconds`` is what was measured; None: unknown.
    """
    found, times = [graph.predicted for graph in report.graphs if graph.predicted is not None], report.times
    full = sum(one.full for one in found)
    predicted: dict[str, float] = {}
    if full:
        predicted[FULL] = 1.0
        if all(one.autocast for one in found):
            predicted[AUTOCAST] = full / sum(one.full / one.autocast for one in found)
        predicted[OURS] = full / sum(one.full if one.left_alone else one.full / one.speed for one in found)
    reference = times.get(FULL) or times.get(AS_WRITTEN)
    names = sorted({**predicted, **times}, key=lambda name: {FULL: 0, AUTOCAST: 1, AS_WRITTEN: 1, OURS: 2}.get(name, 3))
    return [
        {"name": name, "predicted": predicted.get(name), "seconds": times.get(name),
         "measured": reference / times[name] if reference and name in times else None}
        for name in names
    ]  # fmt: skip


def checked_times(given: Mapping[str, float]) -> dict[str, float]:
    """Return measured seconds by name; AmpGraphError if one of them is not positive."""
    for name, seconds in given.items():
        if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise AmpGraphError(
                f"report: the time of {name} is {seconds!r}\n  legal: seconds of a step or a call\n"
                '  fix:   amp_graph.report(model, times={"fp32": 0.21, "amp_graph": 0.11})'
            )
    return {str(name): float(seconds) for name, seconds in given.items()}


# -- the history of a loss scale ----------------------------------------------------------------------


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
