"""The figures on the first screen of a report's page: what is low, casts, time, memory.

Before: a ``Report``. After: ``Summary(flops=Share(low=9.6e9, all=9.7e9), casts=Casts(captured=0, ...), ...)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_graph.errors import AmpGraphError
from amp_graph.passes.autocast_regions.casts_under_autocast import CastsUnderAutocast
from amp_graph.report.graph_flow import Flow
from amp_graph.report.records import WEIGHT, GraphReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

LOW = ("bf16", "f16")
FULL, AUTOCAST, OURS = "fp32", "torch.autocast", "amp_graph"
AS_WRITTEN = "as written"  # of a script, in its own precision


@dataclass(frozen=True)
class Share:
    """How much of a quantity is in low precision."""

    low: int
    all: int

    @property
    def percent(self) -> float:
        """The low share of all, in percent; 0 of nothing."""
        return 100 * self.low / self.all if self.all else 0.0


@dataclass(frozen=True)
class Casts:
    """Numbers of casts: ``captured`` are the user's own, of which ``own`` are still in the rewritten graphs.

    ``kept``: those of ``weights`` whose result stays between calls. ``autocast``: those of ``torch.autocast`` in the
    graphs as captured, or why one of them was not counted; None without a graph.
    """

    captured: int
    own: int
    activations: int
    weights: int
    kept: int
    autocast: CastsUnderAutocast | None = None

    @property
    def after(self) -> int:
        """All casts of the rewritten graphs."""
        return self.own + self.activations + self.weights


@dataclass(frozen=True)
class Time:
    """The time under one precision: predicted as a multiple of fp32's, measured in seconds; None: unknown."""

    name: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of all graphs of a report together; ``machine``: what the predicted times are for."""

    flops: Share
    bytes: Share
    operations: Share
    casts: Casts
    times: tuple[Time, ...]
    machine: str
    memory: dict[str, int]
    written: int
    captured_bytes: int

    @property
    def reference(self) -> Time | None:
        """The measured time that others are compared with: fp32's, or else that of the script as written."""
        known = {time.name: time for time in self.times if time.measured is not None}
        return known.get(FULL) or known.get(AS_WRITTEN)


def summary_of(told: Report) -> Summary:
    """Return the figures of ``told``."""
    nodes = [node for graph in told.graphs for node in graph.operations]
    sizes = [item for graph in told.graphs for item in graph.bytes.items()]
    written = sum(size for _, size in sizes)
    found = [graph.predicted for graph in told.graphs if graph.predicted is not None]
    return Summary(
        _flops(told),
        Share(sum(size for name, size in sizes if name in LOW), written),
        Share(sum(node.precision == "low" for node in nodes), len(nodes)),
        _casts(told),
        _times(told),
        found[0].machine if found else "",
        dict(told.memory),
        written,
        sum(graph.captured_bytes for graph in told.graphs),
    )


def _flops(told: Report) -> Share:
    low = every = 0
    for graph, flow in zip(told.graphs, told.flows, strict=True):
        lowered = {node.name for node in graph.nodes if node.precision == "low"}
        low += sum(vertex.flops for vertex in flow.vertices if vertex.name in lowered)
        every += sum(vertex.flops for vertex in flow.vertices)
    return Share(low, every)


def _casts(told: Report) -> Casts:
    casts = [cast for graph in told.graphs for cast in graph.casts]
    weights = sum(cast.of == WEIGHT for cast in casts)
    names = [{n.name for n in nodes if n.kind == "cast"} for nodes in told.captured]
    own = sum(map(_still_there, told.graphs, told.flows, names))
    kept = sum(cast.kept for cast in casts)
    return Casts(sum(map(len, names)), own, len(casts) - weights, weights, kept, _under_autocast(told))


def _under_autocast(told: Report) -> CastsUnderAutocast | None:
    """Return the casts of ``torch.autocast`` in all graphs, or why those of one were not counted."""
    found = [graph.autocast for graph in told.graphs if graph.autocast is not None]
    why_not = next((one.why_not for one in found if one.why_not), "")
    if not found or why_not:
        return CastsUnderAutocast(why_not=why_not) if why_not else None
    return CastsUnderAutocast(sum(one.activations for one in found), sum(one.weights for one in found))


def _still_there(graph: GraphReport, flow: Flow, captured: set[str]) -> int:
    """Return how many of the user's casts are in the rewritten graph."""
    ours = {cast.name for cast in graph.casts}
    return sum(vertex.name in captured and vertex.name not in ours for vertex in flow.vertices)


def _times(told: Report) -> tuple[Time, ...]:
    """Return a row for each known time: fp32 first, then torch.autocast, then what runs here."""
    found = [graph.predicted for graph in told.graphs if graph.predicted is not None]
    full = sum(one.full for one in found)
    predicted: dict[str, float] = {}
    if full:
        predicted[FULL] = 1.0
        if all(one.autocast for one in found):
            predicted[AUTOCAST] = sum(one.autocast * one.full for one in found) / full
        predicted[OURS] = sum((1.0 if one.left_alone else one.ratio) * one.full for one in found) / full
    names = sorted({**predicted, **told.times}, key=lambda name: {FULL: 0, AUTOCAST: 1, OURS: 3}.get(name, 2))
    return tuple(Time(name, predicted.get(name), told.times.get(name)) for name in names)


def checked_times(given: Mapping[str, float]) -> dict[str, float]:
    """Return measured seconds by name; AmpGraphError if one of them is not positive."""
    for name, seconds in given.items():
        if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise AmpGraphError(
                f"report: the time of {name} is {seconds!r}\n  legal: seconds of a step or a call\n"
                '  fix:   amp_graph.report(model, times={"fp32": 0.21, "amp_graph": 0.11})'
            )
    return {str(name): float(seconds) for name, seconds in given.items()}
