"""The table of precisions: for each module, the dtypes that are stored, computed in, and kept of gradients and states.

Rows are made from what was counted in the looked-at steps, and from the parameters and the optimizers' states as they
are when the report is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.audit.records import Training


@dataclass
class Row:
    """One module: bytes by dtype of parameters, gradients and optimizer state; calls and FLOPs by dtype of operations.

    ``decided``: who lowered its operations: the places of autocast regions and of the user's casts.
    """

    module: str
    parameters: Counter[str] = field(default_factory=Counter)
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    gradients: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)


def rows_of(training: Training) -> list[Row]:
    """Return a row for each module that has parameters or ran operations, in the order of the model."""
    found: dict[str, Row] = {}

    def row(module: str) -> Row:
        return found.setdefault(module, Row(module))

    states = _states(training)
    for model in list(training.models):
        for name, p in model.named_parameters():
            one = row(name.rpartition(".")[0])
            one.parameters[_name(p)] += p.numel() * p.element_size()
            if p.grad is not None:
                one.gradients[_name(p.grad)] += p.grad.numel() * p.grad.element_size()
            for t in states.get(id(p), ()):
                one.states[_name(t)] += t.numel() * t.element_size()
    for call, totals in training.calls.items():
        if call.phase == "update" or not call.output:
            continue
        one = row(call.module)
        (one.forward if call.phase == "forward" else one.backward)[call.output] += totals.calls
        one.flops[call.inputs[0] if call.inputs else call.output] += totals.flops
        if call.region >= 0 and call.output in ("bfloat16", "float16"):
            one.decided[str(training.regions[call.region].place)] += totals.calls
        elif call.cast == "user":
            one.decided[str(call.place)] += totals.calls
    return list(found.values())


def _states(training: Training) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for optimizer in list(training.optimizers):
        for p, state in optimizer.state.items():
            found[id(p)] = [t for t in _values(state) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return found


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
