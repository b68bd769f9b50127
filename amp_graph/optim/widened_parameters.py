"""Holds trained half-precision parameters in fp32 while their model is converted: the policy word ``widen=true``.

Before: a model that transformers loaded in bf16, whose updates of 1e-5 round to nothing. After: the same Parameter
objects in fp32, which the plan casts; ``revert`` rounds them to the dtype in which they came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from amp_graph.errors import CaptureError
from amp_graph.lists.errors import Undo
from amp_graph.optim.master_weight_updates import optimizers_there
from amp_graph.optim.master_weights import MASTER, hold_as, unchanged_where_it_raises
from amp_graph.policy_words import HALVES


def trained_halves(model: Module) -> dict[str, Parameter]:
    """Return the parameters that train in half precision, by name."""
    return {name: p for name, p in model.named_parameters() if p.dtype in HALVES and p.requires_grad}


@contextmanager
def widen_parameters(model: Module, *, states: bool) -> Iterator[dict[str, torch.dtype]]:
    """Hold trained half-precision parameters in fp32, and buffers beside them; yield the dtypes that they had.

    They are the same Parameter objects, so an optimizer that was built before holds them already. states: what its
    earlier steps left as half-precision state becomes fp32, too. If the block raises, everything is restored.
    """
    halves = trained_halves(model)
    if known := [name for name, p in halves.items() if hasattr(p, MASTER)]:
        raise CaptureError(
            f"convert: widen=true, and a MixedPrecisionOptimizer holds fp32 masters of {len(known)} parameters: "
            f"{known[0]}\n  fix:   amp_graph.convert(model, ...) first, then the optimizer"
        )
    buffers = _buffers_beside(model, halves)
    found = [vars(one).get("state", {}) for one in optimizers_there()] if states else []  # of a wrapper, maybe none
    kept = [state[p] for state in found for p in halves.values() if p in state]
    with unchanged_where_it_raises(model, halves.values(), kept):
        before = {name: t.dtype for name, t in (*halves.items(), *buffers.items())}
        for parameter in halves.values():
            hold_as(parameter, parameter.data.float())
        for state in kept:
            state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype in HALVES})
        _hold_buffers(buffers, dict.fromkeys(buffers, torch.float32))
        with Undo(lambda: _hold_buffers(buffers, before)):
            yield before


def narrow_parameters(model: Module, before: Mapping[str, torch.dtype]) -> None:
    """Round what ``widen_parameters`` held in fp32 to the dtypes that it yielded."""
    for name, parameter in model.named_parameters():
        if name in before:
            hold_as(parameter, parameter.data.to(before[name]))
    _hold_buffers({name: b for name, b in model.named_buffers() if name in before}, before)


def _buffers_beside(model: Module, halves: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Return half-precision buffers of modules that own a trained parameter: statistics of batch norms."""
    held = {id(p) for p in halves.values()}
    found = {}
    for path, module in model.named_modules():
        if any(id(p) in held for p in module.parameters(recurse=False)):
            named = module.named_buffers(prefix=path, recurse=False)
            found.update({name: b for name, b in named if b.dtype in HALVES})
    return found


def _hold_buffers(buffers: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    for name, buffer in buffers.items():
        buffer.data = buffer.data.to(dtypes[name])
