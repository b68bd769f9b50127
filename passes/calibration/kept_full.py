"""Which operations of a graph stay in full precision, by a calibration or by name, and why.

Before: a graph, and a ``Calibration``. After: ``{node: "run.json: its value: max 1.2e5 > 65504 in 3 of 40 batches"}``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.calibration.node_keys import few, inside_of

BY_NAME = "kept by keep_ops"


def kept_full(
    keys: Mapping[Node, str], calibration: Calibration | None, names: Collection[str], dtype: torch.dtype
) -> dict[Node, str]:
    """Return the operations that stay full, with reasons; ``names``: the keys that a policy's ``keep_ops`` lists."""
    found = {node: f"{BY_NAME} ({key})" for node, key in keys.items() if key in names}
    if calibration is None:
        return found
    out = calibration.out_of_range(str(dtype).removeprefix("torch."))
    where = os.path.basename(calibration.where) or "calibration"
    return {node: f"{where}: {out[key]}" for node, key in keys.items() if key in out} | found


def unmatched(low: Mapping[Node, str], keys: Collection[str], calibration: Calibration) -> tuple[list[Node], str]:
    """Return operations planned low of which ``calibration`` knows nothing, and a warning; ``low``: their keys."""
    nodes = [node for node, key in low.items() if key not in calibration.values]
    if not nodes:
        return [], ""
    unknown = [low[node] for node in nodes]
    places = {inside_of(key) for key in keys}
    absent = [key for key in calibration.values if key not in keys and inside_of(key) in places]
    beside = f"; it has {len(absent)} that the graph lacks: {few(absent)}" if absent else ""
    never_ran = ", with batches that run that branch" if "" not in places and not absent else ""
    return nodes, (
        f"amp_graph: calibration {calibration.where or 'given'}, made of {calibration.model or 'a model'}, does not "
        f"know {len(unknown)} of {len(low)} operations that are planned low: {few(unknown)}{beside}; they are planned "
        "without it\n  fix:   amp_graph.calibrate(model, batches).save(path) on this model, under this policy"
        f"{never_ran}"
    )
