"""Select the passes that run over a graph from the table of all passes, in its order.

Before: ``Policy.parse("bf16").pipeline_options("cpu")``. After: ``[IdentifyOps(), ..., PlanPrecision(...), ...]``.
"""

from __future__ import annotations

from amp_graph.passes.base import Pass
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import Phase, Row
from amp_graph.passes.pipeline_table import TABLE


def pipeline(phase: Phase, options: PipelineOptions) -> list[Pass]:
    """Return the passes of ``phase``, in order, built from ``options``."""
    return [row.built(options) for row in TABLE if phase in row.phases and not why_off(row, phase, options)]


def why_off(row: Row, phase: Phase, options: PipelineOptions) -> str:
    """Return why a pipeline of ``phase`` does not contain the pass of ``row``; "" if it does."""
    for name in (row.name, *row.joins):
        if name in options.skip:
            return f"skip={options.skip[name]} in the policy"
    return next((need.otherwise for need in row.conditions if not need.holds(options)), "")
