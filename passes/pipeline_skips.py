"""The words of ``skip=``: names of passes and groups of passes.

Before: ``skip=fuse-gelu|backend``. After: ``{"fuse-gelu": "fuse_gelu", "attention": "backend", ...}``, one word per
pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from amp_graph.passes.pipeline_row import Stage
from amp_graph.passes.pipeline_table import TABLE

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
