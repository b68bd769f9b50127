"""Select the passes that run over a graph from the table of all passes, in its order.

Before: ``Policy.parse("bf16").pipeline_options("cpu")``. After: ``[IdentifyOps(), ..., PlanPrecision(...), ...]``.
``passes_named(["fuse_gelu", "backend"])`` is what ``skip=fuse-gelu|backend`` leaves out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from amp_graph.passes.base import Pass
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import Phase, Row, Stage
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


# -- the words of skip=: names of passes and groups of passes -----------------------------------------


# The passes that a policy may skip; the others make the plan and its casts, or have their own option.
SKIPPABLE = tuple(sorted(row.word for row in TABLE if row.skippable))
# All skippable passes of a stage. "backend" is every backend pass, including those without their own word.
GROUPS = {
    stage.value: found
    for stage in Stage
    if (found := tuple(r.name for r in TABLE if r.stage is stage and (r.skippable or r.backend)))
}


def is_legal(word: str) -> bool:
    """Say whether ``skip=`` accepts ``word``, a name with underscores."""
    return word in SKIPPABLE or word in GROUPS


def is_pass(word: str) -> bool:
    """Say whether ``word``, a name with underscores, names a pass of the table, optional or not."""
    return any(row.word == word for row in TABLE)


def nearest(word: str) -> list[str]:
    """Return the legal words closest to ``word``."""
    return difflib.get_close_matches(word.replace("-", "_"), (*SKIPPABLE, *GROUPS), 3, 0.5)


def passes_named(words: Iterable[str]) -> dict[str, str]:
    """Return the names of the passes that ``words`` skip, each with the word that names it."""
    found: dict[str, str] = {}
    for word in words:
        for name in GROUPS.get(word, (word.replace("_", "-"),)):
            found.setdefault(name, word)
    return found
