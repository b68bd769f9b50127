"""Detects gradients that underflow in fp16: trained without a loss scale, such a model learns nothing.

Before: ``loss.backward()``, and gradients of zero. After: an AmpGraphWarning, once, with the lines that scale the loss.
Without any scaler in the process it comes at the first backward, before anything has underflowed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.capture.diagnostics import Diagnostics
from amp_graph.errors import warn
from amp_graph.passes.torch_compat.autograd import at_end_of_backward, number_of_backward
from amp_graph.scaling.loss_scale import LossScale

# Below this fp16 keeps fewer than bf16's 8 significant bits: subnormals are multiples of 2^-24; half of one is 0.
LIMIT = 2.0**-17
# The gradient of a loss is 1 and that of outputs under a mean loss less: a larger one was scaled by hand.
LARGEST_UNSCALED = 1.0
FIX = (
    "scaler = amp_graph.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); "
    "or policy 'bf16'"
)


@dataclass
class UnderflowWatch:
    """Checks the gradients of backward passes 1, 2, 4, 8, ... of a model in fp16, until it finds an underflow.

    It reads the gradients of graph outputs and of parameters. Zeros alone prove nothing: units may be dead, losses
    masked, weights frozen. Proof is that the largest output gradient, or the largest gradient of most weights, is
    below ``LIMIT`` and not zero; or that all parameter gradients are zero and those of the outputs are not.
    """

    diagnostics: Diagnostics
    calls: int = 0
    found: bool = False
    _began: bool = False  # whether the first backward was checked
    _seen: int = -1  # the backward that is being checked
    _arrived: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # largest values, and their number
    _unread: list[tuple[Callable[[], bool], torch.Tensor, int]] = field(default_factory=list)  # in flight from a GPU

    def after(self, results: Any) -> None:
        """Check the backward of the call that returned ``results``, if it is due."""
        if self.found or not torch.is_grad_enabled():
            return
        self._read()
        self.calls += 1
        if self.calls & (self.calls - 1):
            return
        nodes = {id(one.grad_fn): one.grad_fn for one in _tensors(results) if one.grad_fn is not None}
        for node in nodes.values():
            node.register_prehook(self._at_output)

    def _at_output(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        plain = [g.detach() for g in grads if g is not None and _is_plain(g)]
        if self.found or not plain or _is_recorded(plain[0]):
            return
        if self._seen != number_of_backward():
            self._seen = number_of_backward()
            self._arrived.clear()  # left by a backward that raised
            at_end_of_backward(self._at_end)
        self._arrived += [(_largest(g), g.numel()) for g in plain]

    def _at_end(self) -> None:
        self._seen = -1
        if not self._arrived:  # of a backward with a nested one
            return
        arrived, elements = [large for large, _ in self._arrived], max(count for _, count in self._arrived)
        self._arrived.clear()
        grads = [p.grad for p in self.diagnostics.model.parameters() if p.grad is not None and _is_plain(p.grad)]
        device = arrived[0].device
        if any(g.device != device for g in (*arrived, *grads)):
            return
        with torch.no_grad():
            held = torch.stack([torch.stack(arrived).max(), *map(_largest, grads)])
        if device.type == "cpu":
            self._judge(held.tolist(), elements)
        elif device.type == "cuda":  # asynchronous: the step goes on
            there = torch.empty(held.shape, pin_memory=True).copy_(held, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._unread.append((event.query, there, elements))

    def _read(self) -> None:
        """Evaluate the values whose copies from the GPU have arrived."""
        while self._unread and self._unread[0][0]():
            _, there, elements = self._unread.pop(0)
            self._judge(there.tolist(), elements)

    def _judge(self, held: list[float], elements: int) -> None:
        arrived, *grads = held
        if self.found or not all(map(math.isfinite, held)) or not arrived:
            return  # infinities are overflow, not underflow
        small = sum(0 < g < LIMIT for g in grads)
        if arrived < LIMIT:
            self._say(f"the largest gradient of its outputs is {arrived:.1e}")
        elif grads and elements > 1 and not any(grads):  # a loss inside the model may be masked
            self._say(f"all gradients are zero, and the largest of its outputs is {arrived:.1e}")
        elif small > sum(g >= LIMIT for g in grads):
            self._say(f"of {small} of {len(grads)} parameters the largest gradient is below {LIMIT:.1e}")
        elif not self._began and arrived <= LARGEST_UNSCALED and not has_scaler():
            self._say_that_nothing_scales()
        self._began = True

    def _say_that_nothing_scales(self) -> None:
        what = "trains in fp16, and nothing in this process scales losses: gradients below 3.0e-08 become 0"
        self.diagnostics.note(f"{what}; scale the loss")
        warn(f"amp_graph: {type(self.diagnostics.model).__name__} {what}\n  fix:   {FIX}")

    def _say(self, what: str) -> None:
        self.found = True
        what = f"gradients are too small for fp16, which rounds below 3.0e-08 to 0 and is inexact just above: {what}"
        self.diagnostics.note(f"{what}; scale the loss")
        warn(f"amp_graph: {type(self.diagnostics.model).__name__}: {what}\n  fix:   {FIX}")


def has_scaler() -> bool:
    """Return whether a loss scale exists: a gradient scaler, ours or torch's, or that of a TrainStep."""
    kinds = (torch.amp.GradScaler, LossScale)
    scalers = (one for one in gc.get_objects() if issubclass(type(one), kinds))  # isinstance would ask proxies
    return any(isinstance(one, LossScale) or one.is_enabled() for one in scalers)


def _tensors(results: Any) -> Iterable[torch.Tensor]:
    given = results if isinstance(results, (tuple, list)) else (results,)
    return (one for one in given if isinstance(one, torch.Tensor))


def _is_plain(grad: torch.Tensor) -> bool:
    """Return whether a gradient can be checked: not one that is sharded, sparse or fake."""
    return type(grad) is torch.Tensor and grad.layout == torch.strided and grad.is_floating_point() and grad.numel() > 0


def _is_recorded(grad: torch.Tensor) -> bool:
    return grad.is_cuda and torch.cuda.is_current_stream_capturing()


def _largest(grad: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(grad.detach(), math.inf).float()
