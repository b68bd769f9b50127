"""SGD, Adam, AdamW and Adagrad with a one-pass update, for users' own loops over a converted model.

Before: ``torch.optim.AdamW(model.parameters(), fused=True)``, after whose step the model casts every weight again.
After: ``amp_graph.optim.AdamW(model.parameters())``, which writes the low-precision copies as it updates the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from amp_graph.errors import CompilerError, ScaleError
from amp_graph.optim.native_update import (
    GroupTensors,
    is_by_triton,
    options_of,
    place_of,
    rule_of,
    why_not_flat,
)
from amp_graph.optim.native_update_ops import OPS, library
from amp_graph.optim.torch_fused_update import GroupUpdate, group_updates, why_no_kernel
from amp_graph.passes.backends.cuda.kernels import optimizer_update
from amp_graph.passes.loss_scaling.unscale import inverse_of
from amp_graph.passes.profitability.thresholds import one_pass_is_profitable
from amp_graph.passes.torch_compat.dynamo_frames import not_captured
from amp_graph.passes.torch_compat.optimizers import plain_step

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]


class OnePassOptimizer(Optimizer):
    """The base of the optimizers here: options, state and ``state_dict`` as in torch's class of the same name.

    A step also updates the low-precision copies in a converted model's weight cache: the next forward casts none.
    Parameters, state and copies are bit-equal to those of torch's fused kernel, except a tensor's last elements, fewer
    than 16, which may differ in the last place. Torch's kernels run the step for other tensors than fp32 on the CPU,
    for fewer than a million weights, and without a C compiler. ``how``: "one pass", or "torch's kernels" and why.
    On CUDA the pass is Triton's, where its kernels are switched on and there are copies to write: elements are those of
    torch's kernel to a few last places, and no step waits for the device.

    The step changes version counters, whoever runs it, unlike torch's fused optimizers: a second backward of a graph
    whose weights it changed raises an error, not a wrong gradient. The one pass leaves the cached copies valid.
    Raises ScaleError for ``fused=False``; else the same errors as torch's.
    """

    updates_as: ClassVar[type[Optimizer]]
    how: str = "no step yet"
    update_shows: bool = False  # whether the last step changed version counters and wrote the copies
    _step_supports_amp_scaling = True
    _no_compiler: str = ""

    def __init_subclass__(cls) -> None:
        """Copy the signature of torch's class."""
        cls.__signature__ = inspect.signature(cls.updates_as)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of torch's class of the same name."""
        if options.get("fused") is False:
            name = type(self).__name__
            raise ScaleError(
                f"amp_graph.optim.{name}: fused=False, but these optimizers fall back to fused kernels\n"
                f"  legal: fused=True, which is the default\n  fix:   torch.optim.{name}(..., fused=False)"
            )
        super().__init__(*args, **{**options, "fused": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a saved optimizer, which may have used other kernels."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["foreach"], group["fused"] = None, True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return the result of ``closure``, called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @not_captured
    def _update(self) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        why = self._no_compiler or why_no_kernel(self) or _why_not(trained)
        by_triton = bool(trained) and is_by_triton(trained[0].device)
        why = why or (self._why_not_by_triton(trained) if by_triton else "")
        updates = [] if why else group_updates(self, trained)
        why = why or next((told for update in updates if (told := why_not_flat(update, trained[0].device))), "")
        low = torch.bfloat16
        if not by_triton:
            why = why or self._compiled([rule_of(update, low) for update in updates])
        self.how = f"torch's kernels: {why}" if why else "one pass"
        self.update_shows = not why
        if why:
            plain_step(self.updates_as)(self)
            if trained and (trained[0].device.type != "cpu" or not self._is_bad()):
                increment_version(trained)  # torch's fused kernels change none: a kept graph would read new weights
        elif by_triton:
            self._by_triton(updates, low)
            increment_version(trained)
        elif not self._is_bad():
            self._unscale(trained)
            _in_one_pass(updates, low)
            increment_version(trained)

    def _why_not_by_triton(self, trained: Sequence[Tensor]) -> str:
        """Return why Triton's kernels do not run, spare too little, or cannot read what decides on a step; or ""."""
        device = trained[0].device
        rates = [group["lr"] for group in self.param_groups if isinstance(group["lr"], Tensor)]
        if any(lr.device != device or lr.numel() != 1 or lr.dtype.itemsize < 4 for lr in rates):
            return f"a learning rate is a tensor, and no number on {device}"
        given = [getattr(self, name, None) for name in ("found_inf", "grad_scale")]
        if any(t is not None and (t.device != device or t.dtype != torch.float32 or t.numel() != 1) for t in given):
            return f"the verdict or the scale of a scaler is not fp32 on {device}"
        return "there are no low-precision copies to write"

    def _by_triton(self, updates: Sequence[GroupUpdate], low: torch.dtype) -> None:
        """Update as ``_in_one_pass`` does, where a scaler wants it, with gradients unscaled as torch's kernels do."""
        found_inf, scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        inverse = None if scale is None else inverse_of(scale)
        for update in updates:
            given = (*_tensors_of(update).arguments(), update.group["lr"], found_inf, inverse, None)
            options = {"rule": rule_of(update, low), "store": scale is not None, **options_of(update)}
            optimizer_update.update(*given, **options)

    def _compiled(self, rules: Sequence[str]) -> str:
        """Return why the pass cannot be compiled, or "" if it is compiled."""
        try:
            for rule in rules:
                library(rule)
        except CompilerError as error:
            self._no_compiler = str(error).partition("\n")[0]
        return self._no_compiler

    def _is_bad(self) -> bool:
        """Return whether a scaler found a gradient that is not finite."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and found_inf.item() > 0

    def _unscale(self, trained: Sequence[Tensor]) -> None:
        """Divide gradients in place by the scale that a scaler passed to the optimizer, as torch's kernels do."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            torch._foreach_div_([p.grad for p in trained if p.grad is not None], scale)


def _why_not(trained: Sequence[Tensor]) -> str:
    """Return why torch's kernels must update ``trained``, because of its gradients or size, or ""."""
    device = trained[0].device if trained else torch.device("cpu")
    for p in trained:
        grad = p.grad
        assert grad is not None, "only called for parameters with a gradient"
        runs = device.type == "cpu" or is_by_triton(device)
        if not runs or grad.dtype != torch.float32 or grad.device != device or grad.layout is not torch.strided:
            return f"the gradient of a parameter of shape {tuple(p.shape)} is not fp32 on {place_of(device)}"
    if is_by_triton(device):  # asked when it is known which copies there are
        return ""
    elements = sum(p.numel() for p in trained)
    return "" if one_pass_is_profitable("cpu", elements) else f"{elements:,} elements are too few to be worth compiling"


def _in_one_pass(updates: Sequence[GroupUpdate], low: torch.dtype) -> None:
    """Update parameters, state and copies, without changing version counters."""
    for update in updates:
        given = _tensors_of(update)
        lr = torch.as_tensor(update.group["lr"], dtype=torch.float64, device="cpu")
        options = options_of(update)
        OPS.one_pass_update_(*given.arguments(), lr, None, None, None, rule=rule_of(update, low), **options)


def _tensors_of(update: GroupUpdate) -> GroupTensors:
    """Return the tensors of a group, without copies."""
    lows: list[Any] = [None] * len(update.params)
    grads: list[Any] = [p.grad for p in update.params]
    return GroupTensors(list(update.params), grads, update.states, lows, "step" in update.state_names())


class SGD(OnePassOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` in one pass; with dampening, torch's kernels.

    Parameters and defaults are those of ``torch.optim.SGD``. Raises its errors, and ScaleError for ``fused=False``.
    """

    updates_as = torch.optim.SGD


class Adam(OnePassOptimizer, torch.optim.Adam):
    """``torch.optim.Adam``, in one pass.

    Parameters and defaults are those of ``torch.optim.Adam``. Raises its errors, and ScaleError for ``fused=False``.
    """

    updates_as = torch.optim.Adam


class AdamW(OnePassOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW``, in one pass.

    Parameters and defaults are those of ``torch.optim.AdamW``. Raises its errors, and ScaleError for ``fused=False``.
    """

    updates_as = torch.optim.AdamW


class Adagrad(OnePassOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad``, in one pass.

    Parameters and defaults are those of ``torch.optim.Adagrad``. Raises its errors, and ScaleError for ``fused=False``.
    """

    updates_as = torch.optim.Adagrad
