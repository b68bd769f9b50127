"""The parts of a training step: the captured forward with its loss, the trained inputs, state of update and scale.

Before: a rewritten graph that returns the loss. After: ``forward_and_backward``, which is traced; passes append the
rest to that graph (``step_table.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.errors import CaptureError
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.loss_scaling.scale_loss import scaled_seed
from amp_graph.passes.step.lay_out_gradients import upcast
from amp_graph.passes.torch_compat.autograd import any_branch_of_backward
from amp_graph.passes.weights.cast_weights import Hoisted
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.step.reduce_gradients import Ranks

DETACHED = (
    "TrainStep: the loss depends on no parameter that is trained: there is no gradient\n"
    "  legal: a loss computed from the model's outputs without detach(), .item() or torch.no_grad()\n"
    "  fix:   look for these in loss_fn and forward"
)
LOWS = (torch.bfloat16, torch.float16)


class NoGradient(Exception):
    """Raised during a trace if the loss does not depend on some trained inputs; holds their numbers."""

    def __init__(self, inputs: Sequence[int]) -> None:
        """Store the numbers."""
        super().__init__(inputs)
        self.inputs = frozenset(inputs)


@dataclass
class StepParts:
    """The captured forward, the trained inputs, and the state of update and scale.

    Numbers in ``trained`` index the captured graph's inputs, or, below 0, ``absent``.
    """

    forward: Callable[..., Any]
    args: Sequence[Any]
    trained: list[int]
    updates: list[GroupUpdate]
    learning_rates: list[Tensor]
    accumulators: list[Tensor]
    scale: LossScale | None
    names: Sequence[str] = ()  # of the captured graph's inputs
    hoisted: Sequence[Hoisted] = ()  # the graph's further inputs, one per weight cast
    copies: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)  # the cast inputs and dtypes
    masters: dict[int, Tensor] = field(default_factory=dict)  # masters, updated instead of low-precision inputs
    ranks: Ranks | None = None
    absent: dict[int, Tensor] = field(default_factory=dict)  # trained by other micro-batches of this step only
    absent_names: Mapping[int, str] = field(default_factory=dict)
    by_data: bool = False  # whether the captured graph has data-dependent sizes
    norm: Tensor | None = None  # gets the norm of the gradients where they are clipped by it
    clip_norm: float | None = None
    clip_value: float | None = None
    micro_batches: int = 1
    last: bool = True  # whether this graph is the last micro-batch's, which updates
    loss: int = 0  # index of the captured graph's output that is the loss
    outside: bool = False  # whether the optimizer is called after the graph, which then returns the gradients
    pointwise: bool = False  # whether the update consists of pointwise operations, for a compiler to fuse
    gradients_given: bool = False  # whether inputs are what is trained, then the gradients of that, then the loss

    def tensor_of(self, i: int) -> Any:
        """Return the tensor of number ``i``."""
        return self.absent[i] if i in self.absent else self.args[i]

    def name_of(self, i: int) -> str:
        """Return the name of the tensor of number ``i``."""
        return self.absent_names[i] if i in self.absent else self.names[i]

    def own(self) -> list[int]:
        """Return the numbers in ``trained`` that are inputs of the captured graph."""
        return [i for i in self.trained if i not in self.absent]

    def keeps(self) -> tuple[torch.dtype, ...]:
        """Return the low dtypes in which gradients may stay, as the update casts them itself."""
        alone = self.ranks is None and self.last and not self.accumulators
        return LOWS if alone and not self.pointwise and not self.outside else ()

    # -- forward and backward, traced -----------------------------------------------------------------

    def forward_and_backward(self, *given: Any) -> list[Any]:
        """Return outputs, gradients of ``own()``, and the loss's gradient, from inputs and copies; this is traced."""
        if self.gradients_given:
            *_, loss = given
            count = len(self.own())
            return [loss.detach(), *(grad.detach() for grad in given[count : 2 * count]), torch.ones_like(loss)]
        count = len(self.args)
        copies = dict(zip(self.copies, given[count:], strict=True))
        return [part for parts in self.gradients(given[:count], copies) for part in parts]

    def gradients(
        self, args: Sequence[Any], copies: Mapping[tuple[int, torch.dtype], Tensor], scale: Tensor | None = None
    ) -> tuple[list[Any], list[Tensor], list[Tensor]]:
        """Return outputs, gradients of ``own()``, each summed over its copies, and the loss's gradient."""
        own = self.own()
        with torch.enable_grad():
            lows = _one_each([copies[h.source, h.dtype] for h in self.hoisted])
            for h, low in zip(self.hoisted, lows, strict=True):
                low.requires_grad_(h.source in own)
            outputs = self.forward(*args, *lows)
            sources = [(i, args[i]) for i in own]
            sources += [(h.source, low) for h, low in zip(self.hoisted, lows, strict=True) if h.source in own]
            parts = 1 if scale is None else self.micro_batches
            outputs, found, seed = differentiate(outputs, self.loss, [s for _, s in sources], scale, parts)
        return outputs, self._summed([i for i, _ in sources], found), [seed]

    def _summed(self, numbers: Sequence[int], found: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradient of each input: a single one, or the fp32 sum of several."""
        parts: dict[int, list[Tensor]] = {}
        for i, grad in zip(numbers, found, strict=True):
            if grad is not None:
                refuse_sparse(self.names[i], grad)
                parts.setdefault(i, []).append(grad)
        own = self.own()
        if len(parts) < len(own):
            raise NoGradient([i for i in own if i not in parts])
        return [_total(parts[i]) for i in own]

    def first_bad(self, args: Sequence[Any]) -> str:
        """Return the name of the first input whose gradient is not finite; recomputes gradients, changes no state."""
        given = [a.clone() if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter) else a for a in args]
        scale = self.scale.scale if self.scale is not None else None
        with torch.random.fork_rng():
            _, grads, _ = self.gradients(given, self.copies, scale)
        return first_bad(self.names, dict(zip(self.own(), grads, strict=True)))


def differentiate(
    outputs: Sequence[Any], loss: int, sources: Sequence[Tensor], scale: Tensor | None, micro_batches: int
) -> tuple[list[Any], Sequence[Tensor | None], Tensor]:
    """Return the outputs without history, the gradients of ``sources``, and that of the loss, unscaled.

    Gradients are those of ``loss * scale / micro_batches``; None for what the loss does not depend on.
    """
    start = outputs[loss]
    if sources and not start.requires_grad:
        raise CaptureError(DETACHED)
    seed = torch.ones_like(start, memory_format=torch.preserve_format)
    given = scaled_seed(seed, scale, micro_batches)
    with any_branch_of_backward(start):
        found = torch.autograd.grad(start, sources, given, allow_unused=True) if sources else ()
    return [o.detach() if isinstance(o, Tensor) else o for o in outputs], found, seed


def first_bad(names: Sequence[str], grads: Mapping[int, Tensor]) -> str:
    """Return the name of the first input whose gradient is not finite."""
    bad = [i for i, grad in grads.items() if not grad.isfinite().all()]
    return f"{names[bad[0]]}, of shape {tuple(grads[bad[0]].shape)}" if bad else "a gradient that is gone"


def refuse_sparse(name: str, grad: Tensor | None = None) -> None:
    """Raise CaptureError if ``grad``, the gradient of the parameter ``name``, is sparse; None: it will be."""
    if grad is None or grad.layout is not torch.strided:
        raise CaptureError(
            f"TrainStep: the gradient of {name} is sparse, which no fused update supports\n"
            "  legal: dense gradients\n"
            "  fix:   sparse=False in its embedding, or amp_graph.convert(model) with amp_graph.GradScaler"
        )


def _total(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    total, *others = map(upcast, parts)
    for other in others:
        total = total + other
    return total


def _one_each(copies: list[Tensor]) -> list[Tensor]:
    """Return one leaf per copy, so that gradients of two casts of one weight are summed in fp32."""
    seen: set[int] = set()
    leaves = []
    for copy in copies:
        leaves.append(copy.detach().requires_grad_(copy.requires_grad) if id(copy) in seen else copy)
        seen.add(id(copy))
    return leaves
