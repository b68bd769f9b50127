"""``MixedPrecisionOptimizer``: apex's ``FP16_Optimizer`` over any torch optimizer.

Before: ``optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)``. After: the same call of this class;
``optimizer.backward(loss)``, ``optimizer.clip_master_grads(norm)`` and ``optimizer.step()`` do not change.
Source of the interface: apex/fp16_utils/fp16_optimizer.py, and the BERT scripts that use ``loss_scale=0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import ScaleError
from amp_graph.lists.errors import Attempt, Undo
from amp_graph.optim.check_optimizer import load_or_refuse, refuse_closures
from amp_graph.optim.master_weight_updates import let_optimizers_update_masters, narrow_gradients
from amp_graph.optim.master_weights import (
    full_value,
    make_master,
    set_master,
    unchanged_where_it_raises,
    write_back,
)
from amp_graph.policy_words import HALVES
from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.scaling.loss_scale import LossScale, loss_scale_of

OWN = ("optimizer", "scaler", "_held", "_backward", "_unscaled")  # attributes of an instance


def _inside(name: str) -> Any:
    """Return a method that delegates to the inner optimizer's method of that name."""

    def method(self: MixedPrecisionOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"As ``torch.optim.Optimizer.{name}``; the hook gets the inner optimizer."
    return method


class MixedPrecisionOptimizer(Optimizer):
    """Loss scaling and fp32 master weights around ``optimizer``, which updates the masters.

    optimizer: any torch optimizer. Its fp16 or bf16 parameters (``amp_graph.convert(model, "fp16-O2")``, or a model
    that was cast by hand) get fp32 masters, which its steps update and round into them; fp32 parameters are updated
    directly.
    static_loss_scale, dynamic_loss_scale, dynamic_loss_args ("init_scale", "scale_factor", "scale_window"): as in
    apex; ``verbose`` is accepted and ignored. loss_scale instead of these: a number, "dynamic" or 0 for a dynamic one,
    or a ``LossScale``.

    A step with an infinite gradient changes nothing and lowers the scale; a fused ``optimizer`` needs no copy to the
    host. Learning-rate schedulers accept this object; hooks are those of the inner optimizer. It can be copied and
    pickled together with the model, in either order. Raises ScaleError for calls out of order.
    """

    def __init__(  # the base class would create its own groups and state
        self,
        optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        *,
        loss_scale: LossScale | str | float | None = None,
    ) -> None:
        """Create masters for the low-precision parameters of ``optimizer``."""
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, MixedPrecisionOptimizer):
            raise ScaleError(
                f"MixedPrecisionOptimizer: expected an optimizer, got a {type(optimizer).__name__}\n"
                "  legal: a torch.optim.Optimizer\n  fix:   MixedPrecisionOptimizer(torch.optim.AdamW(...))"
            )
        refuse_closures("MixedPrecisionOptimizer", optimizer)
        self.optimizer = optimizer
        self.scaler = GradScaler()
        self.scaler._loss_scale = _scale_of(loss_scale, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self._held: list[Tensor] = []  # parameters in low precision, which have masters
        self._backward, self._unscaled = False, False
        self._make_masters()

    def _make_masters(self) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.dtype in HALVES]
        with unchanged_where_it_raises(torch.nn.Module(), params):
            known = set(map(id, self._held))
            for parameter in params:
                make_master(parameter)
            let_optimizers_update_masters()
            self._held += [p for p in params if id(p) not in known]

    # -- the loop -------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Compute gradients of the scaled ``loss`` (one element); gradients accumulate until ``step``.

        update_master_grads: accepted as in apex and ignored; masters get their gradients when first needed.
        retain_graph: as in ``Tensor.backward``.

        Raises ScaleError for another loss, and after the gradients were unscaled.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ScaleError(
                f"MixedPrecisionOptimizer.backward: the loss is {_kind_of(loss)}\n"
                "  legal: a tensor of one element\n  fix:   optimizer.backward(loss.mean())"
            )
        if self._unscaled:
            raise ScaleError(
                "MixedPrecisionOptimizer.backward: called after the gradients were unscaled\n"
                "  fix:   all backward calls first, then clip_master_grads, then step"
            )
        self.scaler.scale(loss).backward(retain_graph=retain_graph)
        self._backward = True

    def update_master_grads(self) -> None:
        """Unscale the gradients, which are then fp32, once between two steps; ``step`` does it if needed."""
        self._need_backward("update_master_grads")
        if not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the unscaled fp32 gradients to ``max_norm`` and return their norm before, a 0-d fp32 tensor.

        max_norm: above 0. norm_type: the order of the norm; ``math.inf`` for the largest element.

        Raises ScaleError for another ``max_norm``, and without a backward since the last step.
        """
        self._need_backward("clip_master_grads")
        if not (isinstance(max_norm, Real) and max_norm > 0):  # 0 or less would reverse or cancel the update
            raise ScaleError(
                f"MixedPrecisionOptimizer.clip_master_grads: max_norm={max_norm!r}\n  legal: a number above 0\n"
                "  fix:   optimizer.clip_master_grads(1.0)"
            )
        self.update_master_grads()
        params: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and round them into the parameters, unless a gradient is infinite; adjust the scale.

        closure: called once, before gradients are checked; it calls ``optimizer.backward(loss)``, and what it returns
        is returned.
        """
        given = None
        if closure is not None:
            with torch.enable_grad():
                given = closure()
        self._need_backward("step")
        self.update_master_grads()
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        self._backward = self._unscaled = False
        return result if closure is None else given

    def zero_grad(self, set_to_none: bool = True, **unused: Any) -> None:
        """Drop the gradients of the model's parameters, or zero them if ``set_to_none`` is False."""
        if self._unscaled:  # the unscaled gradients are dropped
            narrow_gradients(self.optimizer)
            self.scaler._per_optimizer_states.clear()
        self.optimizer.zero_grad(set_to_none)
        self._backward = self._unscaled = False

    def _need_backward(self, caller: str) -> None:
        if not self._backward:
            raise ScaleError(
                f"MixedPrecisionOptimizer.{caller}: no gradients since the last step\n"
                "  fix:   optimizer.backward(loss) instead of loss.backward()"
            )

    # -- reading --------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the inner optimizer."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """The loss scale as a number; copies it to the host."""
        return self.scaler.get_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.scaler._loss_scale.set(value)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for an infinite gradient: a copy to the host."""
        return bool(self.scaler.found_inf.item() > 0)

    @property
    def skipped_steps(self) -> Tensor:
        """The number of skipped steps, a 0-d int32 tensor on the device."""
        return self.scaler.skipped_steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add ``param_group``, as torch's optimizers take it, to the inner optimizer, with masters where needed."""
        self.optimizer.add_param_group(param_group)
        self._make_masters()

    register_step_pre_hook = _inside("register_step_pre_hook")
    register_step_post_hook = _inside("register_step_post_hook")
    register_state_dict_pre_hook = _inside("register_state_dict_pre_hook")
    register_state_dict_post_hook = _inside("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _inside("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _inside("register_load_state_dict_post_hook")

    # -- saving ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle between two steps, without the ``step`` wrapper that a scheduler sets on the original."""
        masters = [full_value(p) if p.dtype in HALVES else None for p in self._held]
        return {**{name: self.__dict__[name] for name in OWN}, "masters": masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and attach the masters to the copied parameters."""
        masters = state.pop("masters")
        self.__dict__.update(state)
        for parameter, full in zip(self._held, masters, strict=True):
            if full is not None:  # else the model was reverted
                set_master(parameter, full)
        let_optimizers_update_masters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and loss scale, and the fp32 masters in the order of the groups."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.scaler.state_dict(),
            "masters": list(map(full_value, self._held)),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` result; if it does not fit, raise ScaleError and change nothing.

        A state without masters (of level O1, with fp32 parameters) keeps the model's current values.
        """
        scale = self.scaler.state_dict()
        with Attempt(ScaleError) as tried, Undo(lambda: self.scaler.load_state_dict(scale)):
            masters = self._masters_in(state_dict)
            self.scaler.load_state_dict(dict(state_dict["loss_scale"]))
            load_or_refuse("MixedPrecisionOptimizer", self.optimizer, state_dict["optimizer"])
        if tried.error is not None:
            raise ScaleError(
                f"MixedPrecisionOptimizer: the state is none of this class: {tried.reason}\n"
                "  legal: what state_dict() of a MixedPrecisionOptimizer over the same model returned\n"
                "  fix:   load the checkpoint of this model"
            ) from tried.error
        with torch.no_grad():
            for parameter, master in zip(self._held, masters, strict=False):
                full = make_master(parameter) if parameter.dtype in HALVES else parameter
                full.copy_(master)
        if masters:
            write_back(self._held)

    def _masters_in(self, state: Mapping[str, Any]) -> Sequence[Tensor]:
        """Return the masters in ``state``, possibly none; ValueError where they are not those of this optimizer."""
        masters: Sequence[Tensor] = state.get("masters", [])
        fits = isinstance(masters, Sequence) and len(masters) in (0, len(self._held))
        if not fits or not all(map(_is_like, masters, self._held)):
            raise ValueError(f"its masters are not those of the {len(self._held)} parameters in low precision")
        return masters

    def __repr__(self) -> str:
        """Name the inner optimizer."""
        return f"MixedPrecisionOptimizer({self.optimizer!r})"


def _kind_of(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"


APEX = {"init_scale": "init_scale", "scale_factor": "growth_factor", "scale_window": "growth_interval"}


def _scale_of(given: Any, static: Any, dynamic: Any, options: Any) -> LossScale:
    """Return the loss scale of the arguments: 0 and "dynamic" mean a dynamic one."""
    if given is None and type(dynamic) is not bool:
        raise ScaleError(
            f"MixedPrecisionOptimizer: dynamic_loss_scale={dynamic!r}\n  legal: True, False\n"
            "  fix:   loss_scale='dynamic'"
        )
    found = loss_scale_of("MixedPrecisionOptimizer", static if given is None and not dynamic else given, zero=True)
    return found or _apex_scale({} if options is None else options)


def _apex_scale(options: Any) -> LossScale:
    """Return the dynamic scale of apex's ``dynamic_loss_args``."""
    if not isinstance(options, Mapping) or not options.keys() <= APEX.keys():
        raise ScaleError(
            f"MixedPrecisionOptimizer: dynamic_loss_args={options!r}\n  legal: a dict of {', '.join(APEX)}\n"
            "  fix:   loss_scale=amp_graph.LossScale(...), which has more options"
        )
    ours = {APEX[name]: value for name, value in options.items()}
    back = {"backoff_factor": 1 / ours["growth_factor"]} if ours.get("growth_factor") else {}
    return LossScale(**ours, **back)


def _is_like(master: Any, full: Tensor) -> bool:
    """Say whether ``copy_`` copies ``master`` into ``full`` as it is."""
    numbers = master.is_complex() if full.is_complex() else master.is_floating_point()
    return bool(numbers and master.layout is torch.strided and not master.is_meta and master.shape == full.shape)
