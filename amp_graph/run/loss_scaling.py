"""Scales the losses of a script whose models run in fp16: the script sees no scale, and loses no gradient to it.

Before: ``loss.backward()``, whose small gradients are 0 in fp16. After: the same call starts from the scale in place of
1, and when it returns, the gradients of all leaves are unscaled: what the script clips, logs and accumulates is as it
would be. Where gradients overflowed, the scale is halved, and optimizers that hold them skip their next step.

The law: scales are powers of two, and the leaves are fp32, so that scaling is exact. That holds for any number of
losses, optimizers and accumulated backwards. What it does not hold for makes all models stay, or become again, as
written (``eligibility`` has the reasons): who reads a gradient within a backward sees a scaled one. Over several ranks
DDP does so: ``several_ranks`` has the gradients unscaled before that, and the ranks agree on the steps that they skip.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.dispatch import in_backward
from amp_graph.passes.torch_compat.operators import foreach_mul_
from amp_graph.passes.torch_compat.optimizers import let_steps_be_skipped
from amp_graph.run import eligibility as why
from amp_graph.run.call_site import called_by_script, site_of_call
from amp_graph.run.gradient_leaves import can_begin, leaves_of, why_not_scaled
from amp_graph.run.several_ranks import are_finite, are_several, spread_overflow, unscaled_on_arrival
from amp_graph.run.tensor_references import References, add, is_in

if TYPE_CHECKING:
    from amp_graph.run.own_scale import OwnScale


class LossScaling:
    """Watches backwards and optimizer steps as written, and scales the former once a model runs in fp16.

    why: the reason why nothing is scaled, or is any more. stood_aside: called when that is found.
    """

    def __init__(self, stood_aside: Callable[[str], None]) -> None:
        """Watch from ``start()`` on."""
        self.why, self.skipped, self.is_on = "", 0, False
        self._stood_aside = stood_aside
        self._new_scale: Callable[[float], OwnScale] | None = None  # once a model is in fp16
        self._scale: OwnScale | None = None  # from the first loss then
        self._scaled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models in fp16
        self._reached: References = {}  # leaves that a backward of the script has reached
        self._held: References = {}  # parameters of optimizers whose steps can be skipped
        self._left: References = {}  # parameters of models that never run in fp16, among them shards
        self._bad: References = {}  # leaves whose gradient overflowed, until it is dropped or zeroed
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    # -- deciding -------------------------------------------------------------------------------------

    def why_not(self, module: torch.nn.Module) -> str:
        """Return why the gradients of ``module`` cannot be scaled, or not yet; "" if they can."""
        if self.why:
            return self.why
        if reason := why.why_not_scaled(module):
            return reason
        trained = [p for p in module.parameters() if is_in(self._reached, p)]
        return "" if trained and all(is_in(self._held, p) for p in trained) else why.NO_STEP

    def leave(self, module: torch.nn.Module) -> None:
        """Skip no step because of the gradients of ``module``."""
        add(self._left, module.parameters())

    def begin(self, module: torch.nn.Module, new_scale: Callable[[float], OwnScale]) -> None:
        """Scale all losses from now on: ``module`` was converted to fp16."""
        self._new_scale, self.is_on = new_scale, True
        self._scaled.add(module)

    def stand_aside(self, reason: str) -> None:
        """Scale nothing from now on."""
        if not self.why:
            self.why, self.is_on = reason, False
            self._reached.clear()
            self._stood_aside(reason)

    def lines(self) -> list[str]:
        """Return the scale and the skipped steps, in a line."""
        count = f"{self.skipped} optimizer step{'s' * (self.skipped != 1)} skipped"
        if self._scale is None:
            return [f"fp16: {count}, as another rank's gradients overflowed"] if self.skipped else []
        return [f"fp16: losses scaled by {self._scale.value():g} at the end, {count}"]

    # -- backward -------------------------------------------------------------------------------------

    def backward(self, plain: Callable[..., None], tensors: Any, grad_tensors: Any, **how: Any) -> None:
        """Run ``plain``, which is ``torch.autograd.backward``, from scaled gradients if that is due."""
        roots = [*tensors] if type(tensors) in (list, tuple) else [tensors]
        seeds = [*grad_tensors] if type(grad_tensors) in (list, tuple) else [grad_tensors]
        if grad_tensors is None:
            seeds = [None] * len(roots)
        with Attempt() as tried:  # whatever it is, the script must go on
            leaves, reason = leaves_of(roots, converted=self.is_on)
            reason = reason or why_not_scaled(roots, seeds, how)
        if (error := tried.error) is not None:
            leaves, reason = [], f"amp-graph run itself failed: {type(error).__name__}: {error}"
        if reason:
            self.stand_aside(f"{reason}, at {site_of_call()}")
        if not self.is_on or self._new_scale is None or not leaves or not can_begin(roots, seeds):
            plain(tensors, grad_tensors, **how)
            self._look_at(leaves)
            return
        self._scale = self._scale or self._new_scale(_largest(roots, seeds))
        add(self._reached, leaves)
        parameters = (p for m in self._scaled for p in m.parameters() if p.requires_grad)
        leaves += [p for p in parameters if p.device == leaves[0].device]
        leaves = list({id(leaf): leaf for leaf in leaves}.values())
        scale, averaged = self._scale.on(leaves[0].device), are_several()
        if not averaged:
            self._enlarge(leaves, scale)
        given = [
            (torch.ones_like(root) if seed is None else seed) * scale for root, seed in zip(roots, seeds, strict=True)
        ]
        try:
            with unscaled_on_arrival(leaves if averaged else (), self._scale.inverse()):
                plain(roots, given, **how)
        finally:
            self._unscale(self._scale, roots, leaves, averaged)

    def _look_at(self, leaves: Sequence[Tensor]) -> None:
        """Take note of what a backward as written has reached."""
        if self.why:
            return
        if _has_sparse(leaves):
            self.stand_aside(why.SPARSE)
        add(self._reached, leaves)

    @torch.no_grad()
    def _enlarge(self, leaves: Sequence[Tensor], scale: Tensor) -> None:
        """Scale the gradients that are there already, to which scaled ones are added."""
        before = {id(leaf.grad): leaf.grad for leaf in leaves if leaf.grad is not None}
        if before:
            foreach_mul_([*before.values()], scale)

    @torch.no_grad()
    def _unscale(self, scale: OwnScale, roots: Sequence[Tensor], leaves: Sequence[Tensor], averaged: bool) -> None:
        """Unscale the gradients, unless that was done on arrival, and adjust the scale to those that overflowed now."""
        kept = [leaf for leaf in leaves if leaf.grad is not None]
        if _has_sparse(kept):
            for leaf in kept if not averaged else ():
                leaf.grad = leaf.grad * scale.inverse() if leaf.grad is not None else None
            self.stand_aside(why.SPARSE)
            return
        known = {id(leaf.grad): leaf.grad for leaf in kept if leaf.grad is not None and is_in(self._bad, leaf)}
        grads = {id(leaf.grad): leaf.grad for leaf in kept if leaf.grad is not None and id(leaf.grad) not in known}
        if known and not averaged:
            foreach_mul_([*known.values()], scale.inverse())
        if not grads or not scale.unscale([*grads.values()], done=averaged):
            return
        bad = [leaf for leaf in kept if leaf.grad is not None and not leaf.grad.isfinite().all()]
        add(self._bad, bad)
        if averaged:
            spread_overflow(bad)
        if scale.at_lowest or not all(root.isfinite().all() for root in roots):
            self.stand_aside(why.OVERFLOWS)

    def _forget_dropped(self) -> None:
        """Forget gradients that overflowed, where the script has dropped or zeroed them since."""
        for key, ref in list(self._bad.items()):
            leaf = ref()
            if leaf is None or leaf.grad is None or not leaf.grad.any():
                del self._bad[key]

    # -- optimizer steps ------------------------------------------------------------------------------

    def skips(self, optimizer: Optimizer, closure: bool) -> bool:
        """Return whether this step is skipped, as the optimizer holds a gradient that overflowed."""
        if closure:
            self.stand_aside(f"{why.CLOSURE}, at {site_of_call()}")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not self.why and self._counts.get(optimizer) != len(params):
            self._counts[optimizer] = len(params)
            add(self._held, params)
        if are_several():
            skipped = not closure and not are_finite(p for p in params if not is_in(self._left, p))
        else:
            skipped = bool(self._bad) and any(p.grad is not None and is_in(self._bad, p) for p in params)
        self.skipped += skipped
        return skipped

    # -- wrappers -------------------------------------------------------------------------------------

    def start(self) -> Callable[[], None]:
        """Wrap what the script calls; the result ends that."""
        ends = [
            _replaced(torch.autograd, "backward", self._backward),
            _replaced(torch.autograd, "grad", lambda plain: self._refused(plain, why.AUTOGRAD_GRAD)),
            _replaced(torch.Tensor, "register_hook", lambda plain: self._refused(plain, why.HOOKS, _is_inner)),
            _replaced(torch.Tensor, "retain_grad", lambda plain: self._refused(plain, why.HOOKS, _is_inner)),
            _replaced(torch.amp.GradScaler, "scale", lambda plain: self._refused(plain, why.OWN_SCALER, _enabled)),
            let_steps_be_skipped(self.skips),
        ]

        def end_all() -> None:
            for end in ends:
                end()

        return end_all

    def _backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **given: Any) -> None:
            if self._bad and not in_backward():
                self._forget_dropped()
            if self.why or in_backward() or not called_by_script():
                return plain(tensors, grad_tensors, *rest, **given)
            how = dict(zip(("retain_graph", "create_graph", "grad_variables", "inputs"), rest, strict=False)) | given
            return self.backward(plain, tensors, grad_tensors, **how)

        return backward

    def _refused(
        self, plain: Callable[..., Any], reason: str, when: Callable[[Any], bool] = lambda given: True
    ) -> Callable[..., Any]:
        """Return ``plain``, whose call by the script ends all scaling."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.why and not in_backward() and called_by_script() and (not args or when(args[0])):
                self.stand_aside(f"{reason}, at {site_of_call()}")
            return plain(*args, **kwargs)

        return call


def _is_inner(tensor: Any) -> bool:
    return not tensor.is_leaf  # hooks of leaves are looked for at each backward


def _largest(losses: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> float:
    return max((abs(loss.item()) for loss, seed in zip(losses, seeds, strict=True) if seed is None), default=1.0)


def _has_sparse(leaves: Sequence[Tensor]) -> bool:
    return any(leaf.grad is not None and leaf.grad.layout != torch.strided for leaf in leaves)


_enabled = operator.methodcaller("is_enabled")  # of a scaler


def _replaced(place: Any, name: str, wrapper: Callable[[Any], Any]) -> Callable[[], None]:
    """Put what ``wrapper`` makes of ``place.name`` in its place; the result puts it back."""
    plain = getattr(place, name)
    made = wrapper(plain)
    setattr(place, name, made)

    def end() -> None:
        if getattr(place, name) is made:
            setattr(place, name, plain)

    return end
