"""AMP201 to AMP205: the protocol of a loss scale: which losses are scaled, and the order of the scaler's calls.

Between two calls of ``update``: ``scale`` and backward, as often as one likes, ``unscale_`` once, clipping, ``step``.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from amp_graph.audit.autocast_regions import class_of
from amp_graph.audit.codes import finding
from amp_graph.audit.records import Call, Event, Finding, Place, Training, Watcher, tensors_in
from amp_graph.lists import OpClass
from amp_graph.passes.torch_compat.autograd import in_backward

STATIC = 8  # a loss that is multiplied by as much is scaled by hand
OR_BY_TORCH = " or by torch, as there is no CUDA"  # a scaler does not say which


TEXTS = {
    "AMP203": (
        "{norm} clipped here while they were multiplied by the loss scale: they are cut to nearly nothing",
        "scaler.unscale_(optimizer) before it, after the last backward",
    ),
    "AMP204": (
        "unscale_ was called again for an optimizer whose gradients are unscaled: it raises",
        "call scaler.unscale_(optimizer) once, after the last backward of the step",
    ),
    "AMP205": (
        "scaler.step was called again for this optimizer, without scaler.update() in between: it raises",
        "scaler.update() after scaler.step(optimizer), in each step",
    ),
}


def steps_text(steps: Sequence[int], most: int = 5) -> str:
    """Return the numbers of steps as a text."""
    shown = ", ".join(map(str, steps[:most])) + (", ..." if len(steps) > most else "")
    return f"{'step' if len(steps) == 1 else 'steps'} {shown}"


@dataclass
class Iteration:
    """What was called of one scaler since its last ``update``.

    ``waiting``: scaled losses without a backward so far; ``scaled``: whether one had its backward. ``clips``: places,
    and the norms before, where clipping met scaled gradients. ``inside``: ``step`` runs, which unscales by itself.
    ``scales``: where it scaled losses, and how often in looked-at steps, from its first one on.
    """

    scales: Counter[Place]
    waiting: int = 0
    scaled: bool = False
    inside: bool = False
    clips: list[tuple[Place, float]] = field(default_factory=list)
    unscaled: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)


@dataclass(eq=False)
class ScalerUse(Watcher):
    """Follows each scaler from ``scale`` to ``update``."""

    _iterations: weakref.WeakKeyDictionary[Any, Iteration] = field(default_factory=weakref.WeakKeyDictionary)
    _faults: dict[tuple[str, Place], list[int]] = field(default_factory=lambda: defaultdict(list))  # the steps of each
    _norms: dict[Place, float] = field(default_factory=dict)
    _scaled: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # losses
    _scales: list[Counter[Place]] = field(default_factory=list)  # those of each scaler
    _scalers: Counter[Place] = field(default_factory=Counter)  # new ones
    _backward: Place | None = None  # of the backward that runs, of a loss that was not scaled
    _half: Counter[Place] = field(default_factory=Counter)  # float16 operations in such backwards
    _products: int = 0
    _compiled: bool = False

    # -- hearing --------------------------------------------------------------------------------------

    def heard(self, event: Event) -> None:
        """Take a call of a scaler, a backward, or a clipping."""
        if event.name == "disabled scaler.scale" and not event.is_after:
            devices = [t.device.type for t in tensors_in(event.arguments["outputs"])]
            by_torch = "" if torch.cuda.is_available() else OR_BY_TORCH
            why = f"the scaler that is called at {event.place} is disabled, by enabled=False{by_torch}"
            self.training.off[why] = f"torch.amp.GradScaler({(devices or ['cpu'])[0]!r})"
        elif event.name.startswith("scaler."):
            self._take_scaler(event.arguments["self"], event)
        elif event.name == "backward" and not in_backward():
            self._take_backward(event)
        elif event.name == "clip" and event.is_after:
            self._take_clip(event)
        self._compiled |= event.name == "compile"

    def _take_scaler(self, scaler: Any, event: Event) -> None:
        if scaler not in self._iterations:
            self._iterations[scaler] = Iteration(Counter())
            self._scales.append(self._iterations[scaler].scales)
            self._scalers[event.place] += event.name == "scaler.scale"
        iteration = self._iterations[scaler]
        if event.name == "scaler.scale":
            iteration.inside = False
            losses = tensors_in(event.result)  # none before the call
            iteration.waiting += len(losses)
            self._scaled.update(dict.fromkeys(losses))
            iteration.scales[event.place] += event.is_after and event.step + 1 in self.training.looked_at
        elif event.name == "scaler.unscale_" and not event.is_after and not iteration.inside:
            self._take_unscale(iteration, event.arguments["optimizer"], event)
        elif event.name == "scaler.step":
            self._take_step(iteration, event.arguments["optimizer"], event)
        elif event.name == "scaler.update" and event.is_after:
            self._iterations[scaler] = Iteration(iteration.scales)

    def _take_unscale(self, iteration: Iteration, optimizer: Optimizer, event: Event) -> None:
        if optimizer in iteration.unscaled or optimizer in iteration.stepped:
            self._faults["AMP204", event.place].append(event.step + 1)
        self._check_clips(iteration, optimizer, event.step)
        iteration.unscaled.add(optimizer)

    def _take_step(self, iteration: Iteration, optimizer: Optimizer, event: Event) -> None:
        iteration.inside = not event.is_after
        if event.is_after:
            iteration.stepped.add(optimizer)
            return
        if optimizer in iteration.stepped:
            self._faults["AMP205", event.place].append(event.step + 1)
        self._check_clips(iteration, optimizer, event.step)

    def _check_clips(self, iteration: Iteration, optimizer: Optimizer, step: int) -> None:
        if optimizer not in iteration.unscaled:
            for place, norm in iteration.clips:
                self._faults["AMP203", place].append(step + 1)
                if math.isfinite(norm):
                    self._norms[place] = norm
        iteration.clips.clear()

    def _take_backward(self, event: Event) -> None:
        if event.is_after:
            self._backward = None
            return
        waiting = [one for one in self._iterations.values() if one.waiting]
        is_known = waiting or any(t in self._scaled for t in tensors_in(event.arguments["tensors"]))
        self._backward = None if is_known else event.place
        for one in waiting[:1]:
            one.waiting, one.scaled = one.waiting - 1, True

    def _take_clip(self, event: Event) -> None:
        """Keep a clipping of scaled gradients; which ones it clips is not known where it is given an iterator."""
        is_read = event.step + 1 in self.training.looked_at and isinstance(event.result, Tensor)
        norm = float(event.result) if is_read else math.nan
        for iteration in self._iterations.values():
            if iteration.scaled and not iteration.unscaled:
                iteration.clips.append((event.place, norm))

    # -- operations -----------------------------------------------------------------------------------

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count float16 in backwards without a scale, and note losses that are scaled by hand."""
        if call.phase == "forward":
            self._products += class_of(operator) is OpClass.ALLOW
            if call.operator.startswith("aten.mul.") and isinstance(result, Tensor) and result.numel() == 1:
                factor = args[1]
                if isinstance(factor, (int, float)) and STATIC <= abs(factor) < math.inf:
                    self._scaled[result] = None
        elif self._backward is not None and call.phase == "backward" and call.output == "float16":
            self._half[self._backward] += 1

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield what was called in a wrong order, and losses that have no scale or need none."""
        for place, operations in self._half.items():
            scaled = ", ".join(dict.fromkeys(str(one) for scales in self._scales for one in scales))
            whys = [f"losses at {scaled} are scaled"] * bool(scaled) + [*self.training.off]
            fix = ", ".join(self.training.off.values())
            yield finding(
                "AMP201", place, f"the backward of this loss computed {operations} values in float16, and no "
                f"GradScaler scaled it{''.join(f'; {why}' for why in whys)}: gradients below 6e-8 are 0, and those "
                "below 6e-5 lose digits",
                fix or "scaler.scale(loss).backward(), then scaler.step(optimizer) and scaler.update()",
                operations=operations,
            )  # fmt: skip
        yield from self._needless()
        for (code, place), steps in self._faults.items():
            what, fix = TEXTS[code]
            norm = f"a norm of {self._norms[place]:.3g} was" if place in self._norms else "gradients were"
            yield finding(code, place, f"{what.format(norm=norm)} ({steps_text(steps)})", fix, steps=len(steps))
        for place, made in self._scalers.items():
            if made >= max(3, self.training.steps - 1):
                yield finding(
                    "AMP205", place, f"{made} GradScalers scaled a loss here in {self.training.steps} steps: each "
                    "begins with the first scale, whatever the one before has found",
                    "create one GradScaler before the loop", level="warning", scalers=made,
                )  # fmt: skip

    def _needless(self) -> Iterator[Finding]:
        dtypes = dtypes_seen(self.training)
        if "float16" in dtypes or not self._products or self._compiled:
            return
        ran = "bfloat16" if "bfloat16" in dtypes else "float32"
        for place, *others in dict.fromkeys(tuple(+scales) for scales in self._scales if +scales):
            yield finding(
                "AMP202", place, f"a GradScaler scales this loss, and none of the {self._products} products and "
                f"convolutions seen ran in float16: what would underflow there does not in {ran}",
                "GradScaler(enabled=dtype == torch.float16), or none", also=[f"the loss at {one}" for one in others],
                dtype=ran, products=self._products,
            )  # fmt: skip


def dtypes_seen(training: Training) -> set[str]:
    """Return the dtypes that operations of forwards and backwards read or returned."""
    return {d for call in training.calls if call.phase != "update" for d in (*call.inputs, call.output)}
