"""Writes each rewritten graph to PyTorch's own logs: ``TORCH_LOGS`` and the structured trace of ``TORCH_TRACE``.

Before: a rewritten graph. After, with ``TORCH_LOGS=amp_graph``: one line on stderr; with ``TORCH_LOGS=+amp_graph``:
each node with its precision and the reason; with ``TORCH_TRACE=/a/folder``: three artifacts that tlparse shows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from amp_graph.errors import warn
from amp_graph.passes.graph.graph_text import graph_text, target_text
from amp_graph.passes.graph.meta_keys import CAST, LEFT_ALONE, MARK
from amp_graph.passes.graph.node_info import module_path, source_line
from amp_graph.passes.manager import Timed
from amp_graph.passes.precision.predict_time import WORTH_IT
from amp_graph.passes.torch_compat.inductor import add_artifact
from amp_graph.policy_words import word_of

SHOWN = ("identify-ops", "plan-precision", "insert-casts")  # by the plan above
LOG = logging.getLogger("amp_graph")


def log_graph(gm: GraphModule, before: str, passes: Sequence[Timed], policy: str) -> None:
    """Log one rewritten graph: ``before`` is its text as captured, ``passes`` are those that ran.

    Costs nothing that grows with the graph unless a log or a trace is on.
    """
    add_artifact("amp_graph_captured", lambda: before)
    add_artifact("amp_graph_plan", lambda: json.dumps(plan_of(gm), indent=1), "json")
    add_artifact("amp_graph_rewritten", lambda: graph_text(gm))
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s", _summary(gm, passes, policy))
    if LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("%s", "\n".join(_lines(gm, passes)))


def plan_of(gm: GraphModule) -> list[dict[str, str]]:
    """Return a row for each node with a planned precision, and for each cast."""
    return [
        {
            "node": node.name, "operation": target_text(node), "precision": precision, "reason": reason,
            "module": module_path(node), "line": source_line(node),
        }
        for node, (precision, reason) in _planned(gm)
    ]  # fmt: skip


def _planned(gm: GraphModule) -> Iterator[tuple[Node, tuple[str, str]]]:
    """Yield the nodes with a planned precision, and the casts, with their precision (or "cast") and its reason."""
    for node in gm.graph.nodes:
        mark = node.meta.get(MARK)
        if CAST in node.meta:
            yield node, ("cast", str(node.meta[CAST]))
        elif mark is not None:
            yield node, (str(mark.precision), mark.reason)


def _summary(gm: GraphModule, passes: Sequence[Timed], policy: str) -> str:
    planned = [precision for _, (precision, _) in _planned(gm)]
    counts = ", ".join(f"{planned.count(one)} {one}" for one in sorted({*planned} - {"cast"}))
    changed = ", ".join(timed.name for timed in passes if timed.result.modified)
    return f"graph under {policy}: {counts or 'nothing planned'}, {planned.count('cast')} casts; changed by {changed}"


def _lines(gm: GraphModule, passes: Sequence[Timed]) -> Iterator[str]:
    yield "rewritten graph:"
    yield from (f"  {line}" for line in graph_text(gm).splitlines())
    yield "plan:"
    for node, (precision, reason) in _planned(gm):
        yield f"  {node.name} = {target_text(node)}: {precision}: {reason}"
    for timed in passes:
        told = [f"{c.node}: {c.action}: {c.reason}" for c in timed.result.changes]
        told += [f"{s.node}: skipped: {s.reason}" for s in timed.result.skips]
        if told and timed.name not in SHOWN:
            yield f"{timed.name}:"
            yield from (f"  {line}" for line in told)


def warn_of_full_precision(what: str, gm: GraphModule, dtype: torch.dtype) -> None:
    """Warn that ``gm``, a graph of ``what``, stays in fp32 because ``dtype`` is not profitable."""
    low, found = word_of(dtype), gm.meta[LEFT_ALONE]
    warn(
        f"amp_graph: {what} runs in fp32, as {low} is not profitable for this call: it is predicted "
        f"to have {found.speed:.2f} times fp32's speed on {found.machine}, and the least is {WORTH_IT:.2f}\n"
        f"  fix:   policy '{low}' lowers it all the same",
    )
