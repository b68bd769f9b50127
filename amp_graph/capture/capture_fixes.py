"""Suggests a fix for code of which Dynamo captured nothing, by what it said.

Before: "Skip calling `torch.compiler.disable()`d function". After: also the line to change, and how.
"""

from __future__ import annotations

import re

# What the causes say, and what helps; the first that matches.
FIXES = (
    (r"compiler\.disable|_dynamo\.disable", "remove the torch.compiler.disable, or convert the modules that it calls"),
    (
        r"[Dd]ata-dependent|generic_jump|_local_scalar_dense",
        "torch.where or torch.cond in place of the branch; is_causal=True beside a causal mask=",
    ),
    (r"sharded modules", "convert each part before sharding it: fully_shard(amp_graph.convert(part))"),
    (r"force_eager|stance", "torch.compiler.set_stance('default')"),
    (r"no tensor operations", "convert the module whose forward computes: model.forward calls none"),
    (r"tracing failed", "mend the error, or convert the submodules that can be captured"),
)
ELSE = "amp_graph.report(model).text() shows what was not captured; convert the submodules that can be"


def fix_of(causes: str) -> str:
    """Return the fix for these causes, in one line."""
    return next((fix for pattern, fix in FIXES if re.search(pattern, causes)), ELSE)


def with_place(causes: str, where: str) -> str:
    """Return ``causes`` with ``where``, the user's forward, if they name no line."""
    return causes if re.search(r"\.py:\d+", causes) or not where else f"{where}: {causes}"
