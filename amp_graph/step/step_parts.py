"""The parts of a training step: the captured forward with its loss, the trained inputs, state of update and scale.

Before: a rewritten graph that returns the loss. After: ``forward_and_backward``, which is traced; passes append the
rest to that graph (``step_table.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_graph.errors import CaptureError
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.loss_scaling.scale_loss import scaled_seed
from amp_graph.passes.step.lay_out_gradients import LayOutGradients, upcast
from amp_graph.passes.torch_compat.autograd import any_branch_of_backward

if TYPE_CHECKING:
    from amp_graph.step.trace_step import StepBuilder

DETACHED = (
    "TrainStep: the loss depends on no parameter that is trained: there is no gradient\n"
    "  legal: a loss computed from the model's outputs without detach(), .item() or torch.no_grad()\n"
    "  fix:   look for these in loss_fn and forward"
)
LOWS = (torch.bfloat16, torch.float16)


class NoGradient(Exception):
    """Raised during a trace if the loss does not depend on some trained inputs, with their numbers."""


@dataclass
class StepParts:
    """The captured forward, the trained inputs by number, and what the graph does behind backward; ``of``: the options.

    adds: whether the graph updates nothing, and returns gradients, which are added to the sums of micro-batches.
    """

    of: StepBuilder
    args: Sequence[Any]
    trained: list[int]
    names: Sequence[str]  # of the captured graph's inputs
    updates: list[GroupUpdate]
    adds: bool
    outside: bool  # whether the optimizer is called after the graph, which then returns the gradients
    forward: Callable[..., Any] | None = None  # None: inputs are what is trained, its gradients, and the loss
    hoisted: Sequence[tuple[int, torch.dtype]] = ()  # the graph's further inputs, one per weight cast
    copies: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)  # the cast inputs and dtypes
    by_data: bool = False  # whether the captured graph has data-dependent sizes
    loss: int = 0  # index of the captured graph's output that is the loss
    tables: Mapping[int, torch.dtype] = field(default_factory=dict)  # inputs whose lookups may be in this dtype
    absent: frozenset[int] = frozenset()  # trained inputs whose gradients, zeros, this rank does not have

    def layout(self) -> LayOutGradients:
        """Return the pass that lays out gradients; the update casts low ones itself, if nothing else reads them."""
        of = self.of
        alone = of.ranks is None and not self.adds and of.compile == "eager"
        read = any(one is not None for one in (of.loss_scale, of.clip_norm, of.clip_value))
        keeps = LOWS if alone and not self.outside and not read else ()
        return LayOutGradients(keeps, together=alone and read)

    # -- forward and backward, traced -----------------------------------------------------------------

    def forward_and_backward(self, *given: Any) -> list[Any]:
        """Return outputs, gradients of ``trained``, and the loss's gradient, from inputs and copies; this is traced."""
        if self.forward is None:
            *_, loss = given
            count = len(self.trained)
            return [loss.detach(), *(grad.detach() for grad in given[count : 2 * count]), torch.ones_like(loss)]
        count, own = len(self.args), self.trained
        args, copies = given[:count], dict(zip(self.copies, given[count:], strict=True))
        with torch.enable_grad():
            lows = _one_each([copies[cast] for cast in self.hoisted])
            for (i, _), low in zip(self.hoisted, lows, strict=True):
                low.requires_grad_(i in own)
            outputs = self.forward(*args, *lows)
            sources = [(i, args[i]) for i in own]
            sources += [(i, low) for (i, _), low in zip(self.hoisted, lows, strict=True) if i in own]
            outputs, found, seed = differentiate(outputs, self.loss, [s for _, s in sources], None, 1)
        return [*outputs, *self._summed([i for i, _ in sources], found), seed]

    def _summed(self, numbers: Sequence[int], found: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradient of each input: a single one, or the fp32 sum of several."""
        parts: dict[int, list[Tensor]] = {}
        for i, grad in zip(numbers, found, strict=True):
            if grad is not None:
                refuse_sparse(self.names[i], grad)
                parts.setdefault(i, []).append(grad)
        own = self.trained
        if len(parts) < len(own):
            raise NoGradient([i for i in own if i not in parts])
        return [_total(parts[i]) for i in own]


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
