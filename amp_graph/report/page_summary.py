"""The figures on the first screen of a report's page: what is low, casts, speed, memory.

Before: a ``Report``. After: ``{"flops": {"low": 9.6e9, "all": 9.7e9}, "casts": {...}, "speeds": [...], ...}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    return {
        "flops": {
            "low": sum(node.flops for node in nodes if node.precision == "low"),
            "all": sum(node.flops for node in nodes),
        },
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

    ``kept``: those of ``weights`` whose result stays between calls.
    """
    own = captured = 0
    for graph in graphs:
        theirs = {node.name for node in graph.captured if node.kind == "cast"}
        captured += len(theirs)
        own += sum(node.name in theirs and node.kind != "cast" for node in graph.nodes)
    casts = [cast for graph in graphs for cast in graph.casts]
    weights = sum(cast.of == WEIGHT for cast in casts)
    return {
        "captured": captured, "own": own, "after": own + len(casts),
        "activations": len(casts) - weights, "weights": weights, "kept": sum(cast.kept for cast in casts),
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
