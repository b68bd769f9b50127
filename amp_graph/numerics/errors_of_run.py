"""The error of a model's outputs and gradients on batches, against fp64: the metric of ``bisect`` by default.

Before: ``ErrorMetric(model, batches, loss_fn, policy)``, which runs the reference once. After: ``metric(converted,
batches)``, the larger of the relative L2 errors of all outputs and of all gradients of parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.devices import device_of_model
from amp_graph.model_state import unchanged
from amp_graph.numerics.batches import LossFn, gradients, output_and_loss, refuse_infinite
from amp_graph.numerics.differences import difference, scale_for_fp16
from amp_graph.numerics.exact_operations import wide
from amp_graph.policy import Policy

ROOM = 64.0  # by which the scaled gradients of parameters stay below the largest number of fp16: others are larger


@dataclass(frozen=True)
class Ran:
    """The floating-point outputs and the gradients of parameters of one batch, in float64."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


class ErrorMetric:
    """Measures a model against the reference; gradients with a loss scale in fp16."""

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any], loss_fn: LossFn | None, policy: Policy) -> None:
        self.loss_fn, self.scale = loss_fn, 1.0
        self.reference = self._reference(model, batches)
        if policy.torch_dtype(device_of_model(model) or "cpu") == torch.float16:
            self.scale = _scale(self.reference)

    def __call__(self, model: torch.nn.Module, batches: Sequence[Any]) -> float:
        """Return the error over all batches; infinite if anything is not finite that is in the reference."""
        wrong, size = [0.0, 0.0], [0.0, 0.0]
        for number, (batch, ref) in enumerate(zip(batches, self.reference, strict=True)):
            got = self._run(model, batch, number, self.scale)
            pairs = ((got.outputs, ref.outputs), (_values(got, ref), tuple(ref.gradients.values())))
            for i, (mine, theirs) in enumerate(pairs):
                for a, b in zip(mine, theirs, strict=True):
                    error = float(difference(a, b).square().sum()) if a.shape == b.shape else math.inf
                    wrong[i] += math.inf if math.isnan(error) else error
                    size[i] += float(b.nan_to_num(0.0, 0.0, 0.0).square().sum())
        found = [math.sqrt(w / s) if s and math.isfinite(w) else math.sqrt(w) for w, s in zip(wrong, size, strict=True)]
        return max(found)

    def _reference(self, model: torch.nn.Module, batches: Sequence[Any]) -> list[Ran]:
        try:
            wide = copy.deepcopy(model).double()
            return [self._run(wide, _double(batch), n, 1.0) for n, batch in enumerate(batches)]
        except (RuntimeError, TypeError):  # an operation without a kernel for float64, or that asks for float32
            return [self._run(copy.deepcopy(model), batch, n, 1.0) for n, batch in enumerate(batches)]

    def _run(self, model: torch.nn.Module, batch: tuple[Any, ...], number: int, scale: float) -> Ran:
        with unchanged(model, batch), torch.enable_grad():
            out, loss = output_and_loss(model, self.loss_fn, batch)
            if scale == 1.0 and not hasattr(self, "reference"):
                refuse_infinite("bisect", loss, number)
            names = {name: p for name, p in model.named_parameters() if p.requires_grad}
            grads: Sequence[Tensor | None] = [None] * len(names)
            if loss is not None and loss.requires_grad and names:
                grads = gradients(model, [loss * scale], list(names.values()))
            leaves = [t for t in tree_leaves(_plain(out)) if isinstance(t, Tensor) and t.is_floating_point()]
            outputs = tuple(_copied(t) for t in leaves)  # a result may be a buffer or an input, which is restored
        pairs = zip(names, grads, strict=True)
        return Ran(outputs, {n: g.detach().double() / scale for n, g in pairs if g is not None and not g.is_sparse})


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True)


def _values(got: Ran, ref: Ran) -> tuple[Tensor, ...]:
    """Return the gradients of ``got`` that ``ref`` has; one that is missing is 0."""
    return tuple(got.gradients.get(name, torch.zeros_like(grad)) for name, grad in ref.gradients.items())


def _plain(out: Any) -> Any:
    """Return what a model returned as containers that are known: Hugging Face's outputs are dicts."""
    return (
        dict(out)
        if isinstance(out, dict)
        else vars(out)
        if hasattr(out, "__dict__") and not isinstance(out, Tensor)
        else out
    )


def _double(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    widened: tuple[Any, ...] = tree_map(wide, batch)
    return widened


def _scale(reference: list[Ran]) -> float:
    """Return a loss scale with which no gradient of a parameter overflows in fp16."""
    largest = max((float(g.abs().max()) for ran in reference for g in ran.gradients.values() if g.numel()), default=0.0)
    return scale_for_fp16(largest, ROOM)
