"""All watchers, in the order of their codes."""

from __future__ import annotations

from amp_graph.audit.autocast_regions import AutocastRegions
from amp_graph.audit.averages import Averages
from amp_graph.audit.custom_operators import CustomOperators
from amp_graph.audit.ranges import Ranges
from amp_graph.audit.records import Watcher
from amp_graph.audit.reductions import Reductions
from amp_graph.audit.scaler_checkpoints import ScalerCheckpoints
from amp_graph.audit.scaler_use import ScalerUse
from amp_graph.audit.skipped_steps import SkippedSteps
from amp_graph.audit.speed.cast_counts import CastCounts
from amp_graph.audit.speed.missed_operations import MissedOperations
from amp_graph.audit.unsafe_operations import UnsafeOperations
from amp_graph.audit.updates import Updates

WATCHERS: tuple[type[Watcher], ...] = (
    AutocastRegions,
    ScalerUse,
    SkippedSteps,
    ScalerCheckpoints,
    Updates,
    Averages,
    UnsafeOperations,
    Ranges,
    MissedOperations,
    CastCounts,
    CustomOperators,
    Reductions,
)
