"""The table of precisions: for each module, the dtypes that are stored, computed in, and kept of gradients and states.

Rows are made from what was counted in the looked-at steps, and from the parameters and the optimizers' states as they
were at the end of these: models may be gone when the report is made. ``folded`` makes one of the rows of equal layers.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from amp_graph.audit.records import CONVERSION, LOW, Call, Totals, Training, dtype_name
from amp_graph.audit.speed.predicted_time import is_view_by_name
from amp_graph.optim.master_weights import master_of
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.report.report_text import folded_paths

BETWEEN_RANKS = ("c10d", "_c10d_functional")  # the namespaces of collectives


@dataclass
class Row:
    """One module, or ``count`` equal ones: bytes by dtype of what is kept, calls and FLOPs by dtype of operations.

    ``parameters``, ``gradients``, ``states`` (of the optimizer), ``masters``, ``saved`` (for backward): bytes.
    ``forward``, ``backward``: calls by the dtype of their result, but for casts and views. ``flops``: by the dtype of
    operands. ``decided``: who chose a dtype: autocast regions and casts of the user's, by their places, with the calls.
    """

    module: str
    count: int = 1
    parameters: Counter[str] = field(default_factory=Counter)
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    gradients: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    masters: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {"module": self.module, **{name: dict(counter) for name, counter in self.counters().items()}}

    def counters(self) -> dict[str, Counter[str]]:
        """Return all but ``module`` and ``count``."""
        return {one.name: getattr(self, one.name) for one in fields(self)[2:]}


def take_stock(training: Training, *, is_over: bool = False) -> None:
    """Note the dtypes and bytes of what models and optimizers keep; when it ``is_over``, of models without a note."""
    found: dict[str, Row] = {}
    names = training.parameter_names()
    states = {
        id(p): [t for t in state.values() if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]
        for optimizer in list(training.optimizers)
        for p, state in optimizer.state.items()
        if isinstance(state, dict)
    }
    if not (is_over and training.stored):
        updated = (p for one in list(training.optimizers) for group in one.param_groups for p in group["params"])
        training.outside = Counter()
        for p in (p for p in updated if id(p) not in names):
            training.outside[dtype_name(p.dtype)] += p.nbytes
    for model in list(training.models):
        for p in model.parameters():
            if (name := names.pop(id(p), None)) is not None:  # else it was counted in another model
                _store(_row(found, name.rpartition(".")[0]), p, training.gradients, states.get(id(p), ()))
    training.stored = found | training.stored if is_over else training.stored | found


def rows_of(training: Training) -> list[Row]:
    """Return a row for each module that has parameters or ran operations, in the order of the models."""
    found = copy.deepcopy(training.stored)
    for call, totals in training.calls.items():
        if call.phase != "update" and call.output and not call.operator.startswith(BETWEEN_RANKS):
            _compute(_row(found, call.module), call, totals, training)
    for (module, dtype), size in training.saved.items():
        _row(found, module).saved[dtype] += size
    return [row for row in found.values() if any(row.counters().values())]


def _row(found: dict[str, Row], module: str) -> Row:
    return found.setdefault(module, Row(module))


def _store(row: Row, p: Tensor, gradients: dict[int, tuple[str, int]], states: Iterable[Tensor]) -> None:
    row.parameters[dtype_name(p.dtype)] += p.nbytes
    if id(p) in gradients:
        dtype, size = gradients[id(p)]
        row.gradients[dtype] += size
    for t in states:
        row.states[dtype_name(t.dtype)] += t.nbytes
    if (master := master_of(p)) is not None:
        row.masters[dtype_name(master.dtype)] += master.nbytes


def _compute(row: Row, call: Call, totals: Totals, training: Training) -> None:
    if call.cast == "user":
        by = f"by {call.library}, called " if call.library else ""
        row.decided[f"cast {by}at {call.place}"] += totals.calls
    if call.operator == CONVERSION or is_view_by_name(call.operator):
        return
    (row.forward if call.phase == "forward" else row.backward)[call.output] += totals.calls
    row.flops += Counter({call.inputs[0] if call.inputs else call.output: totals.flops})
    if call.region >= 0 and call.output in LOW:
        region = training.regions[call.region]
        row.decided[f"autocast({region.device}, {region.dtype}) at {region.place}"] += totals.calls


# -- beside the modules ------------------------------------------------------------------------------------


def between_ranks(training: Training) -> dict[str, Totals]:
    """Return the reductions and gathers over ranks of the looked-at steps, by name and dtype of what travels."""
    found: dict[str, Totals] = {}
    for call, totals in training.calls.items():
        if call.operator.startswith(BETWEEN_RANKS) and call.inputs:
            one = found.setdefault(f"{call.operator.split('.')[1].strip('_')} {call.inputs[0]}", Totals())
            one.calls, one.bytes = one.calls + totals.calls, one.bytes + totals.bytes
    return found


def folded(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with equal ones as one: ``layers.0.fc`` and ``layers.1.fc`` in the same dtypes, one to one."""

    def kind_of(row: Row) -> tuple[object, ...]:
        return re.sub(r"\b\d+\b", "*", row.module), *map(frozenset, row.counters().values())

    return [_sum(same) for same in grouped((kind_of(row), row) for row in rows).values()]


def _sum(rows: Sequence[Row]) -> Row:
    total = Row(folded_paths(row.module for row in rows), len(rows))
    for row in rows:
        for name, counter in row.counters().items():
            getattr(total, name).update(counter)
    return total
