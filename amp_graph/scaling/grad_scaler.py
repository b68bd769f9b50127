"""``GradScaler``: drop-in for ``torch.amp.GradScaler``, with a floor, a ceiling, hysteresis, and no host syncs.

Before: ``scaler = torch.amp.GradScaler("cuda")``. After: ``scaler = amp_graph.GradScaler()``; the loop stays.
Source: torch/amp/grad_scaler.py, whose protocol (and ``isinstance``) this keeps.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_graph.errors import ScaleError
from amp_graph.optim.check_optimizer import named_parameters, refuse_closures
from amp_graph.optim.master_weight_updates import narrow_gradients, widen_gradients
from amp_graph.passes.loss_scaling import operators as scale_ops
from amp_graph.passes.loss_scaling.scale_loss import inverse_of
from amp_graph.scaling.loss_scale import FloorWatch, LossScale


def _kept(name: str) -> Any:
    """Return a property for an attribute of ``torch.amp.GradScaler`` that this class stores in its ``LossScale``."""

    def write(self: GradScaler, value: Any) -> None:
        self._loss_scale.change(name, value)

    return property(lambda self: getattr(self._loss_scale, name), write)


def _not_begun() -> dict[str, Any]:
    """Return torch's per-optimizer state of a scaler, as at the start of an iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class GradScaler(torch.amp.GradScaler):
    """Scales losses so that fp16 gradients do not vanish, and skips steps whose gradients are infinite.

    As ``torch.amp.GradScaler``: ``scale``, ``unscale_``, ``step``, ``update``, ``get_scale``, ``state_dict`` (which
    either loads from the other), several losses and optimizers.

    device: accepted as in torch; the state is placed on the device of the first loss. init_scale: the first scale, a
    factor. growth_factor (above 1): applied after ``growth_interval`` good steps in a row. backoff_factor (below 1):
    applied after a bad one. growth_interval: a number of updates. enabled: False makes all methods pass through.

    Beyond torch's scaler:

    hysteresis: bad steps since the last growth before the scale backs off (DeepSpeed and Megatron use 2).
    floor, ceiling: limits of the scale. ``at_floor``: "warn" or "error" if gradients stay infinite there.
    process_group: agree on infinite gradients over these ranks; None for all ranks of an initialized
    ``torch.distributed``, False for no agreement (DDP's gradients are equal on all ranks anyway).
    ``skipped_steps``, ``found_inf``: tensors on the device, for a learning-rate scheduler or a log.

    Fused optimizers step without a copy to the host; others, as in torch, need ``found_inf`` on the host.
    A step without any gradient is legal. Raises ScaleError for calls out of order.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        floor: float = 2.0**-14,
        ceiling: float = 2.0**32,
        at_floor: str = "warn",
        process_group: Any = None,
    ) -> None:
        """Create a scaler; its state is placed on the device of the first loss that it scales."""
        self._floor = FloorWatch("GradScaler", at_floor)
        if isinstance(enabled, str):  # "false" is true
            raise ScaleError(f"GradScaler: enabled={enabled!r}\n  legal: True, False\n  fix:   enabled=True")
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._enabled = enabled
        self._loss_scale = LossScale(
            init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, floor, ceiling
        )
        self._group = process_group
        self._per_optimizer_states: defaultdict[int, dict[str, Any]] = defaultdict(_not_begun)
        self._verdict: torch.Tensor | None = None

    # Read and written by the inherited scale, get_scale, get_growth_factor, set_growth_factor, ...
    _growth_factor, _backoff_factor = _kept("growth_factor"), _kept("backoff_factor")
    _growth_interval = _kept("growth_interval")
    _init_scale = property(lambda self: self._loss_scale.values()[0])
    _init_growth_tracker = property(lambda self: self._loss_scale.values()[1])
    _scale = property(lambda self: self._loss_scale.scale if self._loss_scale.ready else None)
    _growth_tracker = property(lambda self: self._loss_scale.state[1] if self._loss_scale.ready else None)

    # -- the loop -------------------------------------------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Place the state on the device of the first loss; torch's ``scale`` calls this."""
        self._loss_scale.to(dev)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place, once between two updates.

        Gradients may be fp32, bf16 or fp16; of the last, what is too small without the scale is lost. Those of
        parameters with fp32 masters (level O2) are fp32 from here to ``step``. Raises ScaleError if it is called
        twice, or after ``step``.
        """
        if not self._enabled:
            return
        self._refuse("unscale_", optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise ScaleError("GradScaler.unscale_: called after step()\n  fix:   call it between backward and step")
        if state["stage"] is OptState.UNSCALED:
            raise ScaleError(
                "GradScaler.unscale_: it was already called for this optimizer since the last update()\n"
                "  fix:   call it once, after the last backward and before step"
            )
        widen_gradients(optimizer)
        self._check(optimizer, inverse_of(self._loss_scale.scale))
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step ``optimizer`` and return its result, unless a gradient is infinite or NaN: then nothing changes.

        Raises ScaleError for a closure, a second step before ``update``, and if nothing was scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        args = args if any(given is not None for given in args) else ()  # accelerate passes closure=None
        if kwargs.get("closure", ...) is None:
            del kwargs["closure"]
        if args or "closure" in kwargs:
            raise ScaleError(
                "GradScaler.step: a closure would compute gradients after they were checked\n"
                "  fix:   call backward yourself, then scaler.step(optimizer)"
            )
        self._refuse("step", optimizer)
        refuse_closures("GradScaler.step", optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise ScaleError(
                "GradScaler.step: it was already called for this optimizer since the last update()\n"
                "  fix:   scaler.update() at the end of each iteration"
            )
        result = None
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not _starts_from_nothing(optimizer):
            result = self._step_on_device(optimizer, state["stage"] is OptState.UNSCALED, kwargs)
        else:  # one that must not be called if a gradient is infinite
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not any(verdict.item() for verdict in self._found_inf_per_device(optimizer).values()):
                result = optimizer.step(**kwargs)
        if state["stage"] is OptState.UNSCALED:
            narrow_gradients(optimizer)
        state["stage"] = OptState.STEPPED
        return result

    def _step_on_device(self, optimizer: Any, unscaled: bool, kwargs: dict[str, Any]) -> Any:
        """Step an optimizer whose kernels take the scale and ``found_inf`` as tensors."""
        known = getattr(optimizer, "grad_scale", None)
        if not unscaled and all(g.dtype.itemsize >= 4 for g in _gradients(optimizer)):
            # The check reads all of them anyway; unscaling here saves the kernels a write.
            self._check(optimizer, inverse_of(self._loss_scale.scale))
        elif not unscaled:  # low-precision gradients would underflow: the kernels unscale them
            scale = self._loss_scale.scale
            self._check(optimizer, torch.ones_like(scale))
            known = scale if known is None else scale * known
        optimizer.grad_scale = known
        optimizer.found_inf = self._combined(self._found_inf_per_device(optimizer).values())
        try:
            return optimizer.step(**kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale by the steps since the last update, or set it to ``new_scale`` (a number, or one element).

        Raises ScaleError if no optimizer was unscaled or stepped since the last update.
        """
        if not self._enabled:
            return
        states = self._per_optimizer_states.values()
        verdicts = [verdict for state in states for verdict in state["found_inf_per_device"].values()]
        if new_scale is not None:
            self._loss_scale.set(new_scale)
        elif not verdicts:
            raise ScaleError(
                "GradScaler.update: no optimizer was unscaled or stepped since the last update()\n"
                "  fix:   scaler.step(optimizer), then scaler.update(), in each iteration"
            )
        else:
            self._verdict = self._combined(verdicts)
            self._loss_scale.update(self._verdict)
            self._floor.look(self._loss_scale, self._culprit)
        self._per_optimizer_states.clear()

    # -- gradients ------------------------------------------------------------------------------------

    def _refuse(self, caller: str, optimizer: Any) -> None:
        """Raise ScaleError if ``optimizer`` is none, or nothing was scaled."""
        if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
            raise ScaleError(
                f"GradScaler.{caller}: expected an optimizer, got a {type(optimizer).__name__}\n"
                f"  legal: a torch.optim.Optimizer\n  fix:   scaler.{caller}(optimizer)"
            )
        if not self._loss_scale.ready:
            raise ScaleError(
                f"GradScaler.{caller}: nothing was scaled yet\n"
                "  fix:   scaler.scale(loss).backward(), then scaler.step(optimizer)"
            )

    def _check(self, optimizer: Optimizer, inv_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradients of ``optimizer``; store and return ``found_inf`` for each of their devices."""
        found = {inv_scale.device: torch.zeros_like(inv_scale)}
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in _gradients(optimizer):
            by_device.setdefault(grad.device, []).append(grad)
        with torch.no_grad():
            for device, grads in by_device.items():
                verdict = found.setdefault(device, torch.zeros((), device=device))
                scale_ops.check_finite_and_unscale_(grads, inv_scale.to(device, non_blocking=True), verdict)
        for verdict in found.values():
            self._agree(verdict)
        self._per_optimizer_states[id(optimizer)] |= {
            "found_inf_per_device": found,
            "optimizer": weakref.ref(optimizer),
        }
        return found

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Check gradients without unscaling; part of torch's private protocol."""
        self._refuse("_check_inf_per_device", optimizer)
        return self._check(optimizer, torch.ones_like(self._loss_scale.scale))

    def _agree(self, verdict: torch.Tensor) -> None:
        """Combine ``found_inf`` over all ranks."""
        distributed = torch.distributed
        if self._group is False or not (distributed.is_available() and distributed.is_initialized()):
            return
        if distributed.get_world_size(self._group) > 1:
            distributed.all_reduce(verdict, op=distributed.ReduceOp.MAX, group=self._group)

    def _combined(self, verdicts: Iterable[torch.Tensor]) -> torch.Tensor:
        scale = self._loss_scale.scale
        found = [verdict.to(scale.device, non_blocking=True) for verdict in verdicts]
        return torch.stack(found).amax() if len(found) > 1 else found[0] if found else torch.zeros_like(scale)

    def _culprit(self) -> str:
        """Return a description of the first parameter whose gradient is not finite."""
        known = [state["optimizer"]() for state in self._per_optimizer_states.values() if "optimizer" in state]
        return next((c for o in known if o is not None and (c := _first_bad(o))), "a gradient that no longer exists")

    # -- reading and saving ---------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> torch.Tensor:
        """The number of skipped steps, a 0-d int32 tensor; on the device from the first loss on."""
        return self._loss_scale.skipped

    @property
    def found_inf(self) -> torch.Tensor:
        """Whether the last update followed an infinite gradient: 0-d fp32 on the device, above 0 if so."""
        return torch.zeros(()) if self._verdict is None else self._verdict

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers; ``torch.amp.GradScaler`` can load it. Empty if not enabled."""
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``; for another raise ScaleError, without a change."""
        if self._enabled:
            self._loss_scale.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle between iterations."""
        if any(s["stage"] is not OptState.READY for s in self._per_optimizer_states.values()):
            raise ScaleError("GradScaler: pickled inside of an iteration\n  fix:   pickle it after update()")
        group = self._group if self._group is False else None
        fresh: defaultdict[int, dict[str, Any]] = defaultdict(_not_begun)
        return {**self.__dict__, "_verdict": None, "_group": group, "_per_optimizer_states": fresh}


def _starts_from_nothing(optimizer: Optimizer) -> bool:
    """Return whether fused SGD would create its momentum in this step: a skipped step leaves it uninitialized."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and any(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in group["params"])
        for group in optimizer.param_groups
    )


def _gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold gradient values: dense ones, and local parts of distributed ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if hasattr(grad, "to_local"):
                grad = grad.to_local()
            if grad.is_sparse:  # the sum of duplicates may overflow
                parameter.grad = grad = grad.coalesce()
                grad = grad._values()
            yield grad


def _first_bad(optimizer: Optimizer) -> str:
    """Return a description of the first parameter of ``optimizer`` whose gradient is not finite."""
    for name, parameter in named_parameters(optimizer):
        grad = parameter.grad
        if grad is not None and not torch.isfinite(grad.coalesce()._values() if grad.is_sparse else grad).all():
            return name
    return ""
