"""All watchers, in the order of their codes."""

from __future__ import annotations

from amp_graph.audit.autocast_regions import AutocastRegions
from amp_graph.audit.ranges import Ranges
from amp_graph.audit.records import Watcher
from amp_graph.audit.unsafe_operations import UnsafeOperations
from amp_graph.audit.updates import Updates

WATCHERS: tuple[type[Watcher], ...] = (
    AutocastRegions,
    Updates,
    UnsafeOperations,
    Ranges,
)
