"""``MixedPrecisionOptimizer``: apex's ``FP16_Optimizer`` over any torch optimizer.

Before: ``optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)``. After: the same call of this class;
``optimizer.backward(loss)``, ``optimizer.clip_master_grads(norm)`` and ``optimizer.step()`` do not change.
Source of the interface: apex/fp16_utils/fp16_optimizer.py, and the BERT scripts that use ``loss_scale=0``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import ScaleError
from amp_graph.optim.check_optimizer import load_or_refuse, refuse_closures
from amp_graph.optim.master_weight_updates import gradient_of_master, groups_kept_where_it_raises
from amp_graph.optim.master_weights import make_master, master_of, share_master, write_back
from amp_graph.policy_words import HALVES
from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.scaling.loss_scale import LossScale, loss_scale_of

OWN = ("optimizer", "scaler", "_pairs", "_plain", "_backward", "_unscaled")  # attributes of an instance


def _inside(name: str) -> Any:
    """Return a method that delegates to the inner optimizer's method of that name."""

    def method(self: MixedPrecisionOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"As ``torch.optim.Optimizer.{name}``; the hook gets the inner optimizer."
    return method


class MixedPrecisionOptimizer(Optimizer):
    """Loss scaling and fp32 master weights around ``optimizer``, which updates the masters.

    optimizer: any torch optimizer. Its fp16 or bf16 parameters (``amp_graph.convert(model, "fp16-O2")``, or a model
    that was cast by hand) get fp32 masters, which replace them and their state in its groups; fp32 parameters are
    updated directly.
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
        self._pairs: list[tuple[Tensor, Tensor]] = []  # parameters in low precision and their masters
        self._plain: list[Tensor] = []  # fp32 parameters
        with groups_kept_where_it_raises(optimizer):
            for group in optimizer.param_groups:
                self._put_masters_into(group)
        self._backward, self._unscaled = False, False

    def _put_masters_into(self, group: dict[str, Any]) -> None:
        state = self.optimizer.state
        params: list[Tensor] = group["params"]
        for i, parameter in enumerate(params):
            if parameter.dtype not in HALVES:
                self._plain.append(parameter)
                continue
            full = params[i] = make_master(parameter)
            self._pairs.append((parameter, full))
            if parameter in state:
                state[full] = {k: _as_full(v) for k, v in state.pop(parameter).items()}

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
        """Set the masters' unscaled fp32 gradients, once between two steps; ``step`` does it if needed."""
        self._need_backward("update_master_grads")
        for parameter, _ in self._pairs:
            master_of(parameter)  # also updates masters after writes to weights
        if self._unscaled:
            return
        for parameter, full in self._pairs:
            full.grad = gradient_of_master(parameter, full)
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
        write_back([p for p, _ in self._pairs])
        for _, full in self._pairs:
            full.grad = None
        self._backward = self._unscaled = False
        return result if closure is None else given

    def zero_grad(self, set_to_none: bool = True, **unused: Any) -> None:
        """Drop the gradients of the model's parameters, or zero them if ``set_to_none`` is False."""
        for parameter in self._parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        for _, full in self._pairs:
            full.grad = None
        if self._unscaled:  # the unscaled gradients are dropped
            self.scaler._per_optimizer_states.clear()
        self._backward = self._unscaled = False

    def _need_backward(self, caller: str) -> None:
        if not self._backward:
            raise ScaleError(
                f"MixedPrecisionOptimizer.{caller}: no gradients since the last step\n"
                "  fix:   optimizer.backward(loss) instead of loss.backward()"
            )

    def _parameters(self) -> Iterator[Tensor]:
        yield from (p for p, _ in self._pairs)
        yield from self._plain

    # -- reading --------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer, with masters in place of low-precision parameters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer, by master."""
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
        """Add ``param_group``, as torch's optimizers take it, to the inner optimizer, with masters where needed.

        Raises ScaleError for a parameter that is in a group already.
        """
        groups = self.optimizer.param_groups
        held = {id(low): n for n, group in enumerate(groups) for low in self._lows_of(group)}
        self.optimizer.add_param_group(param_group)
        for low in groups[-1]["params"]:
            if id(low) in held:
                groups.pop()
                raise ScaleError(
                    f"MixedPrecisionOptimizer.add_param_group: a parameter of shape {tuple(low.shape)} is in group "
                    f"{held[id(low)]} already\n  legal: each parameter in one group\n  fix:   leave it out"
                )
        self._put_masters_into(groups[-1])

    def _lows_of(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the low-precision parameters whose masters are in ``group``."""
        lows = {id(full): low for low, full in self._pairs}
        return [lows[id(full)] for full in group["params"] if id(full) in lows]

    register_step_pre_hook = _inside("register_step_pre_hook")
    register_step_post_hook = _inside("register_step_post_hook")
    register_state_dict_pre_hook = _inside("register_state_dict_pre_hook")
    register_state_dict_post_hook = _inside("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _inside("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _inside("register_load_state_dict_post_hook")

    # -- saving ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle between two steps, without the ``step`` wrapper that a scheduler sets on the original."""
        return {name: self.__dict__[name] for name in OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and attach the masters to the copied parameters."""
        self.__dict__.update(state)
        for parameter, full in self._pairs:
            share_master(parameter, full)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and loss scale, and the fp32 masters in the order of the groups."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.scaler.state_dict(),
            "masters": [full if (found := master_of(p)) is None else found for p, full in self._pairs],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` result; if it does not fit, raise ScaleError and change nothing.

        A state without masters (of level O1, with fp32 parameters) keeps the model's current values.
        """
        scale = self.scaler.state_dict()
        try:
            masters = self._masters_in(state_dict)
            self.scaler.load_state_dict(dict(state_dict["loss_scale"]))
            load_or_refuse("MixedPrecisionOptimizer", self.optimizer, state_dict["optimizer"])
        except BaseException as error:
            self.scaler.load_state_dict(scale)
            if isinstance(error, ScaleError) or not isinstance(error, Exception):
                raise
            raise ScaleError(
                f"MixedPrecisionOptimizer: the state is none of this class: {type(error).__name__}: {error}\n"
                "  legal: what state_dict() of a MixedPrecisionOptimizer over the same model returned\n"
                "  fix:   load the checkpoint of this model"
            ) from error
        with torch.no_grad():
            for (_, full), master in zip(self._pairs, masters, strict=False):
                full.copy_(master)
        if masters:
            write_back([p for p, _ in self._pairs])

    def _masters_in(self, state: Mapping[str, Any]) -> Sequence[Tensor]:
        """Return the masters in ``state``, possibly none; ValueError where they are not those of this optimizer."""
        masters: Sequence[Tensor] = state.get("masters", [])
        fulls = [full for _, full in self._pairs]
        if not isinstance(masters, Sequence):
            raise ValueError(f"its masters are a {type(masters).__name__}, and no list")
        if len(masters) and not (len(masters) == len(fulls) and all(map(_is_like, masters, fulls))):
            raise ValueError(f"it has {len(masters)} masters of other kinds than the {len(fulls)} of this optimizer")
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


def _as_full(value: Any) -> Any:
    """Return an entry of an optimizer's state, upcast to fp32 if it is low."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
