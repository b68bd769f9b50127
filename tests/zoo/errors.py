"""Errors of a converted model against fp32, over those of autocast: outputs and gradients, over some seeds.

One conversion serves all seeds: weights and buffers of another seed are copied into it. Dropout is off.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.losses import float_leaves
from tests.measure import Run, global_gradient_error, output_error
from tests.zoo.model import ZooModel

SEEDS = 3
MORE = 12  # where the ratio over SEEDS is above NEAR: one draw of roundings can be anything
NEAR = 1.1
LOSS_SCALES = 1024.0, 1.0  # the second where autocast overflows with the first
SMALLEST = 1e-6  # an error below is that of fp32 arithmetic

Context = Callable[[], Any]


class AutocastFails(Exception):
    """A model does not run under ``torch.autocast``, so there is nothing to compare with."""


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every rate of dropout to 0, in modules and in the configurations that they read at each call."""
    for module in model.modules():
        holders = [module, getattr(module, "config", None)]
        for holder in filter(None, holders):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                    setattr(holder, name, 0.0)
    return model


def errors(entry: ZooModel, low: torch.dtype, prepare: Callable[[nn.Module], nn.Module], size: int) -> dict[str, Any]:
    """Return ``ratio`` (outputs and gradients), its parts, the errors, over how many seeds, and how many overflowed.

    Seeds count in which autocast's values are finite; ``overflows`` are those in which ours are not. Raises
    AutocastFails.
    """
    reference = without_dropout(entry.made(0).train())
    ours = prepare(copy.deepcopy(reference))
    found: list[tuple[float, float, float, float]] = []
    for seed in range(MORE):
        found.append(_of_seed(entry, low, reference, ours, seed, size))
        if seed + 1 == SEEDS and not _summary(found)["ratio"] > NEAR:
            break
    return _summary(found)


def _summary(found: list[tuple[float, float, float, float]]) -> dict[str, Any]:
    finite = [row for row in found if all(map(math.isfinite, row[2:]))]  # autocast's: ours are compared, or refused
    our_output, our_gradient, their_output, their_gradient = (
        math.sqrt(sum(v * v for v in column) / len(column)) if column else math.nan
        for column in (zip(*finite, strict=True) if finite else [[]] * 4)
    )
    return {
        "ratio": _ratio(math.hypot(our_output, our_gradient), math.hypot(their_output, their_gradient)),
        "output": _ratio(our_output, their_output),
        "gradient": _ratio(our_gradient, their_gradient),
        "errors": [float(f"{e:.3g}") for e in (our_output, our_gradient, their_output, their_gradient)],
        "overflows": sum(not all(map(math.isfinite, row[:2])) for row in finite),
        "seeds": len(finite),
    }


def unmeasured() -> dict[str, Any]:
    """Return what ``errors`` returns where no seed counts."""
    return _summary([])


def _ratio(ours: float, theirs: float) -> float:
    return round(max(ours, SMALLEST) / max(theirs, SMALLEST), 3) if math.isfinite(ours) else math.nan


def _of_seed(
    entry: ZooModel, low: torch.dtype, reference: nn.Module, ours: nn.Module, seed: int, size: int
) -> tuple[float, float, float, float]:
    for scale in LOSS_SCALES:
        row = _with_scale(entry, low, reference, ours, seed, size, scale)
        if all(map(math.isfinite, row[2:])):
            break
    return row


def _with_scale(
    entry: ZooModel, low: torch.dtype, reference: nn.Module, ours: nn.Module, seed: int, size: int, scale: float
) -> tuple[float, float, float, float]:
    fresh = entry.made(seed)
    autocast = lambda: torch.autocast("cpu", low)  # noqa: E731
    off = lambda: torch.autocast("cpu", enabled=False)  # noqa: E731
    runs = []
    for model, context in ((reference, off), (ours, off), (reference, autocast)):
        _take_values(model, fresh)
        try:
            runs.append(_run(entry, model, seed, size, context, scale))
        except Exception as error:
            if context is not autocast:
                raise
            raise AutocastFails from error
    exact, mine, theirs = runs
    mine, theirs = (
        Run(r.outputs, r.loss, {k: g for k, g in r.grads.items() if k in exact.grads}) for r in (mine, theirs)
    )
    return (
        output_error(mine, exact), global_gradient_error(mine, exact),
        output_error(theirs, exact), global_gradient_error(theirs, exact),
    )  # fmt: skip


@torch.no_grad()
def _take_values(model: nn.Module, fresh: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        new = dict(getattr(fresh, kind)())
        for name, value in getattr(model, kind)():
            if name in new and new[name].shape == value.shape:
                value.copy_(new[name])


def _run(entry: ZooModel, model: nn.Module, seed: int, size: int, context: Context, scale: float) -> Run:
    from tests.zoo.trial import call

    model.zero_grad()
    batch = entry.inputs(seed, size)
    with context():
        out = call(model, batch, seed + 1)
        loss = entry.loss(out)
    (loss * scale).backward()
    grads = {n: p.grad.detach().double() / scale for n, p in model.named_parameters() if p.grad is not None}
    return Run(tuple(leaf.detach().double() for leaf in float_leaves(out)), loss.item(), grads)
