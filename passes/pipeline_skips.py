"""The words of ``skip=``: names of passes, groups of passes, and what both were called before.

Before: ``skip=fuse-gelu|backend``. After: ``{"fuse-gelu": "fuse_gelu", "attention": "backend", ...}``, a word a pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from amp_graph.passes.pass_aliases import ALIASES
from amp_graph.passes.pipeline_row import Stage
from amp_graph.passes.pipeline_table import TABLE

# The passes that a policy can do without; the others make the plan and its casts, or have an option of their own.
SKIPPABLE = tuple(sorted(row.word for row in TABLE if row.skippable))
# All passes of a stage that can be left out. "backend" is every backend pass, those too that have no word of their own.
GROUPS = {
    stage.value: found
    for stage in Stage
    if (found := tuple(r.name for r in TABLE if r.stage is stage and (r.skippable or r.backend)))
}


def current_word(word: str) -> str:
    """Return ``word`` with underscores, by its present name; a word that is not known as it is."""
    plain = word.replace("-", "_")
    return ALIASES.get(plain, plain)


def is_legal(word: str) -> bool:
    """Say whether ``skip=`` takes ``word``, a present name with underscores."""
    return word in SKIPPABLE or word in GROUPS


def nearest(word: str) -> list[str]:
    """Return the legal words that look most like ``word``, former ones by their present names."""
    known = {**{name: name for name in (*SKIPPABLE, *GROUPS)}, **ALIASES}
    near = difflib.get_close_matches(word.replace("-", "_"), known, 3, 0.5)
    return list(dict.fromkeys(known[name] for name in near))


def passes_named(words: Iterable[str]) -> dict[str, str]:
    """Return the names of the passes that ``words`` leave out, each with the word that does."""
    found: dict[str, str] = {}
    for word in map(current_word, words):  # a pickled policy may hold former ones
        for name in GROUPS.get(word, (word.replace("_", "-"),)):
            found.setdefault(name, word)
    return found
