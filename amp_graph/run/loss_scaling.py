"""Scales the losses of a script whose models run in fp16: the script sees no scale, and loses no gradient to it.

Before: ``loss.backward()``, whose small gradients are 0 in fp16. After: the same call starts from the scale in place of
1, and each gradient is unscaled before it is accumulated or averaged: what the script clips, logs and accumulates is as
it would be. A gradient that overflowed is NaN throughout, the scale is halved, and optimizers that hold it skip a step.

The law: scales are powers of two, and leaves are fp32, so that scaling is exact, for any number of losses,
optimizers and accumulated backwards. Who reads a gradient within a backward would see a scaled one: all models then
stay, or become again, as written. Ranks agree on a skipped step wherever they agree on its gradients, as replicas must:
their scales may differ, one may even run in fp32, and no collective of ours waits for a rank that does not call it.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.autograd import in_backward
from amp_graph.passes.torch_compat.optimizers import on_every_optimizer_step
from amp_graph.run import eligibility as why
from amp_graph.run.call_site import called_by_script, site_of_call
from amp_graph.run.scaled_backward import all_finite, can_begin, leaves_and_functions, unscaled, why_not_scaled

if TYPE_CHECKING:
    from amp_graph.scaling.loss_scale import LossScale

MOST_DOUBLINGS = 12  # the first scale is at least 16: gradients that overflow at 1 end the scaling


class LossScaling:
    """Watches backwards and optimizer steps as written, and scales the former once a model runs in fp16.

    why: the reason why nothing is scaled, or is any more. stood_aside: called when that is found.
    """

    def __init__(self, stood_aside: Callable[[str], None]) -> None:
        """Watch from ``start()`` on."""
        self.why, self.skipped = "", 0
        self._stood_aside = stood_aside
        self._new_scale: Callable[[float], LossScale] | None = None  # while a model is in fp16
        self._scale: LossScale | None = None  # from the first loss then
        self._overflowed = False  # whether a gradient ever has
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._left: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._taken: dict[Optimizer, list[tuple[Tensor, Tensor | None]]] = {}  # gradients, during a skipped step

    # -- deciding -------------------------------------------------------------------------------------

    def why_not(self, module: torch.nn.Module) -> str:
        """Return why the gradients of ``module`` cannot be scaled, or not yet; "" if they can."""
        if reason := self.why or why.why_not_scaled(module):
            return reason
        held = {id(p) for optimizer in self._stepped for p in _params(optimizer)}
        return "" if all(id(p) in held for p in module.parameters() if p.requires_grad) else why.NO_STEP

    def leave(self, module: torch.nn.Module) -> None:
        """Skip no step because of ``module``: a shard's gradient is one rank's own, and other ranks make that step."""
        self._left.add(module)

    def begin(self, new_scale: Callable[[float], LossScale]) -> None:
        """Scale all losses from now on: a model was converted to fp16."""
        self._new_scale = new_scale

    def stand_aside(self, reason: str) -> None:
        """Scale nothing from now on."""
        if not self.why:
            self.why, self._new_scale = reason, None
            self._stood_aside(reason)

    def lines(self) -> list[str]:
        """Return the scale and the skipped steps, in a line."""
        count = f"{self.skipped} optimizer step{'s' * (self.skipped != 1)} skipped"
        if self._scale is None:
            return [f"fp16: {count}, as another rank's gradients overflowed"] if self.skipped else []
        return [f"fp16: losses scaled by {self._scale.values()[0]:g} at the end, {count}"]

    # -- backward -------------------------------------------------------------------------------------

    def _backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``plain``, which is ``torch.autograd.backward``, from scaled gradients if that is due."""
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self.why or in_backward() or not called_by_script():
                return plain(*args, **kwargs)
            with Attempt() as tried:  # whatever it is, the script must go on
                how = signature.bind(*args, **kwargs).arguments
                roots, seeds = listed(how.pop("tensors")), how.pop("grad_tensors", None)
                seeds = [None] * len(roots) if seeds is None else listed(seeds)
                leaves, functions = leaves_and_functions(roots)
                reason = why_not_scaled((roots, seeds), how, leaves, functions, converted=self._new_scale is not None)
            if tried.error is not None:
                reason = f"amp-graph run itself failed: {tried.reason}"
            if reason:
                self.stand_aside(f"{reason}, at {site_of_call()}")
            if self._new_scale is None or not can_begin(roots, seeds):
                return plain(*args, **kwargs)
            self._scale = self._scale or _first_scale(roots, seeds, self._new_scale)
            return self._scaled(functools.partial(plain, **how), roots, seeds, leaves, self._scale)

        return backward

    def _scaled(
        self,
        plain: Callable[..., None],
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        leaves: Sequence[Tensor],
        scale: LossScale,
    ) -> None:
        """Run ``plain`` scaled, and adjust the scale; a backward that raises may have reached leaves before."""
        value = scale.values()[0]
        given = [(torch.ones_like(r) if s is None else s) * value for r, s in zip(roots, seeds, strict=True)]
        checks: list[Tensor] = []
        try:
            with unscaled(leaves, 1 / value, checks):
                plain(roots, given)
        finally:
            overflowed = not all_finite(checks)
            scale.update(torch.tensor(float(overflowed), dtype=torch.float32, device="cpu"))
            self._overflowed |= overflowed
        if overflowed and (value <= 1 or not all_finite(roots)):
            self.stand_aside(why.OVERFLOWS)

    # -- optimizer steps ------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the gradients of a step that is skipped: optimizers leave parameters without one as they are."""
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            self.stand_aside(f"{why.CLOSURE}, at {site_of_call()}")
            return
        self._stepped.add(optimizer)
        ranks = torch.distributed
        if not (self._overflowed or (ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1)):
            return
        left = {id(p) for module in self._left for p in module.parameters()}
        if not all_finite(p.grad for p in _params(optimizer) if p.grad is not None and id(p) not in left):
            self.skipped += 1
            self._taken[optimizer] = [(p, p.grad) for p in _params(optimizer)]
            for p in _params(optimizer):
                p.grad = None

    def _after_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for p, grad in self._taken.pop(optimizer, ()):
            p.grad = grad

    # -- wrappers -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wrap what the script calls."""
        torch.autograd.backward = self._backward(torch.autograd.backward)
        for place, name, reason, applies in REFUSED:
            setattr(place, name, self._refused(getattr(place, name), reason, applies))
        on_every_optimizer_step(self._before_step, self._after_step)

    def _refused(self, plain: Callable[..., Any], reason: str, applies: Callable[..., bool]) -> Callable[..., Any]:
        """Return ``plain``, whose call by the script ends all scaling."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.why and not in_backward() and called_by_script() and applies(*args, **kwargs):
                self.stand_aside(f"{reason}, at {site_of_call()}")
            return plain(*args, **kwargs)

        return call


def _is_inner(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    return not tensor.is_leaf  # hooks of leaves are looked for at each backward


REFUSED: tuple[tuple[Any, str, str, Callable[..., bool]], ...] = (
    (torch.autograd, "grad", why.AUTOGRAD_GRAD, lambda *args, **kwargs: True),
    (torch.Tensor, "register_hook", why.HOOKS, _is_inner),
    (torch.Tensor, "retain_grad", why.HOOKS, _is_inner),
    (torch.amp.GradScaler, "scale", why.OWN_SCALER, lambda scaler, *args, **kwargs: scaler.is_enabled()),
    (
        torch.nn.utils,
        "clip_grad_norm_",
        why.STRICT,
        lambda *args, **kwargs: bool(kwargs.get("error_if_nonfinite", len(args) > 3 and args[3])),
    ),
)


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def listed(given: Any) -> list[Any]:
    """Return a list or tuple as a list, and what is none as a list of it."""
    return [*given] if isinstance(given, (list, tuple)) else [given]


def _first_scale(
    roots: Sequence[Tensor], seeds: Sequence[Tensor | None], new: Callable[[float], LossScale]
) -> LossScale:
    """Return GradScaler's first scale, 2^16, for a loss around 1, and a lower one for a sum over a batch.

    A sum of 10^5 would skip a step for each factor of 2 between them.
    """
    losses = [abs(root.item()) for root, seed in zip(roots, seeds, strict=True) if seed is None]
    doublings = math.frexp(max(losses, default=1.0))[1] - 1
    return new(2.0 ** (16 - min(max(doublings, 0), MOST_DOUBLINGS))).to(torch.device("cpu"))
