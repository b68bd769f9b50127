"""All watchers, in the order of their codes."""

from __future__ import annotations

from amp_graph.audit.autocast_regions import AutocastRegions
from amp_graph.audit.cast_counts import CastCounts
from amp_graph.audit.custom_operators import CustomOperators
from amp_graph.audit.missed_operations import MissedOperations
from amp_graph.audit.records import Watcher
from amp_graph.audit.reductions import Reductions

WATCHERS: tuple[type[Watcher], ...] = (
    AutocastRegions,
    MissedOperations,
    CastCounts,
    CustomOperators,
    Reductions,
)
