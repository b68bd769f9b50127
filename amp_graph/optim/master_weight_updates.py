"""Makes any torch optimizer update fp32 masters in place of its low-precision parameters.

Before: ``optimizer.step()`` adds lr * update to bf16 weights, which mostly rounds to no change. After: the
same call updates the fp32 masters and rounds them into the weights, whether the optimizer was built before or after
``amp_graph.convert(model, "bf16-O2")``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import warn
from amp_graph.lists.errors import Undo
from amp_graph.optim.master_weights import MASTER, updated_master, write_back
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.torch_compat.optimizers import living, load_hooks_of, on_every_optimizer_step

INSIDE = "_amp_graph_masters"  # the attribute of an optimizer that is stepping on masters
GIVEN = "_amp_graph_given"  # the attribute of an optimizer that is loading the state that is its value


class MastersInPlace:
    """Replaces an optimizer's low-precision parameters by their masters, with its state and fp32 gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Find the parameters of ``optimizer`` that have masters."""
        self.optimizer = optimizer
        self.find()

    def find(self) -> None:
        """Find them again, and update masters after writes to their parameters."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.pairs = [(p, full) for p in params if (full := updated_master(p)) is not None]

    def enter(self) -> None:
        """Swap; all gradients are then fp32, in the layouts of masters.

        A parameter's memory format may have changed since, and fused optimizers ignore strides.
        """
        for p, full in self.pairs:
            full.grad = None if p.grad is None else laid_out_as(full, p.grad.float())
        self.swap()

    def outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``closure`` for a step on masters: it sees the parameters in their places, with current values.

        Each call rounds the masters into the parameters, and passes the computed gradients to the masters.
        """

        def closure_on_parameters() -> Any:
            self.leave()
            with Undo(lambda: self.optimizer.__dict__.pop(INSIDE, None)):  # already left: the step ends here
                result = closure()
                self.find()
            self.enter()
            return result

        return closure_on_parameters

    def swap(self) -> None:
        """Put masters into the groups, with the state of their parameters."""
        self._swap(self.pairs)
        for p, full in self.pairs:
            state = self.optimizer.state.get(full, {})
            for name, value in state.items():  # Adagrad creates state in its constructor
                if isinstance(value, Tensor) and value.dtype == p.dtype:
                    state[name] = value.to(full.dtype)

    def leave(self) -> None:
        """Swap back, and round the masters into their parameters."""
        self._swap([(full, p) for p, full in self.pairs])
        for _, full in self.pairs:
            full.grad = None
        write_back([p for p, _ in self.pairs])

    def _swap(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        instead = {id(old): new for old, new in pairs}
        for group in self.optimizer.param_groups:  # in place: LBFGS keeps the list
            group["params"][:] = [instead.get(id(p), p) for p in group["params"]]
        for old, new in pairs:
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)


def step_with_gradients(optimizer: Optimizer, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Step ``optimizer`` on these gradients only; afterwards restore ``.grad`` of all its parameters."""
    inside = MastersInPlace(optimizer)
    masters = {id(p): full for p, full in inside.pairs}
    inside.swap()
    targets = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [target.grad for target in targets]
    for target in targets:
        target.grad = None  # the step would use an old gradient
    for p, grad in zip(parameters, grads, strict=True):
        target = masters.get(id(p), p)
        target.grad = grad.to(target.dtype)
    try:
        optimizer.step()
    finally:
        for target, old in zip(targets, kept, strict=True):
            target.grad = old
        inside.leave()


def widen_gradients(optimizer: Optimizer) -> None:
    """Upcast the gradients of parameters with masters, so that unscaling does not underflow."""
    for p in _held_low(optimizer):
        _hold_gradient(p, torch.float32)


def narrow_gradients(optimizer: Optimizer) -> None:
    """Downcast these gradients to their parameters' dtype again: Dynamo refuses any other."""
    for p in _held_low(optimizer):
        _hold_gradient(p, p.dtype)


def _hold_gradient(parameter: Tensor, dtype: torch.dtype) -> None:
    grad = parameter.grad
    if grad is not None and grad.dtype is not dtype:
        parameter.grad = None  # a gradient's dtype is fixed while it is set
        parameter.grad_dtype = dtype
        parameter.grad = grad.to(dtype)


def _held_low(optimizer: Optimizer) -> list[Tensor]:
    """Return the low-precision parameters of ``optimizer`` that have masters."""
    return [p for group in optimizer.param_groups for p in group["params"] if updated_master(p) is not None]


def let_optimizers_update_masters() -> None:
    """Make ``step()`` of every torch optimizer, built before or after this call, update masters."""
    on_every_optimizer_step(_before_step, _after_step)


def keep_loaded_states() -> None:
    """Let ``load_state_dict`` of the optimizers that are there keep the fp32 states of parameters with masters."""
    for one in optimizers_there():
        keep_states(one)


def optimizers_there() -> list[Optimizer]:
    """Return the optimizers of the process, not wrappers such as accelerate's, which have no hooks of their own."""
    return [one for one in living(Optimizer) if "optimizer" not in vars(one)]


def _keeps_states(optimizer: Optimizer) -> bool:
    return _before_load in load_hooks_of(optimizer)[0].values()


def keep_states(optimizer: Optimizer) -> None:
    """Let ``optimizer`` load fp32 states of parameters with masters: by hooks of this very optimizer."""
    if _keeps_states(optimizer) or not any(hasattr(p, MASTER) for g in optimizer.param_groups for p in g["params"]):
        return
    optimizer.register_load_state_dict_pre_hook(_before_load)
    optimizer.register_load_state_dict_post_hook(_after_load)


def _before_load(optimizer: Optimizer, state: Any) -> None:
    optimizer.__dict__[GIVEN] = state


def _after_load(optimizer: Optimizer) -> None:
    """Give states that torch has just rounded the values that were given."""
    loaded = optimizer.__dict__.pop(GIVEN)
    ids = [i for group in loaded["param_groups"] for i in group["params"]]
    for i, p in zip(ids, (p for group in optimizer.param_groups for p in group["params"]), strict=True):
        state, full = optimizer.state.get(p, {}), updated_master(p)
        for name, value in loaded["state"].get(i, {}).items() if full is not None else ():
            rounded = state.get(name)
            if isinstance(value, Tensor) and isinstance(rounded, Tensor) and rounded.dtype == p.dtype != value.dtype:
                state[name] = value.to(device=p.device, dtype=torch.float32)


def _warn_of_rounded_states(optimizer: Optimizer) -> None:
    """Warn if an optimizer that steps for the first time has loaded states, which torch rounded; then keep others."""
    for p in () if _keeps_states(optimizer) else _held_low(optimizer):
        state = optimizer.state.get(p, {})
        if state.get("step", 1) > 0 and any(isinstance(v, Tensor) and v.dtype == p.dtype for v in state.values()):
            warn(
                f"amp_graph: the state that {type(optimizer).__name__} loaded before its first step was rounded to "
                f"{p.dtype} by its load_state_dict, which casts to the dtype of parameters\n"
                "  fix:   optimizer.load_state_dict(...) after model.load_state_dict(...), or build the optimizer "
                "before amp_graph.convert"
            )
            break
    keep_states(optimizer)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left_over: MastersInPlace | None = optimizer.__dict__.pop(INSIDE, None)
    if left_over is not None:  # of a step that raised
        left_over.leave()
    inside = MastersInPlace(optimizer)
    if not inside.pairs:
        return None
    _warn_of_rounded_states(optimizer)
    inside.enter()
    optimizer.__dict__[INSIDE] = inside
    if len(args) > 1 and callable(args[1]):
        return (args[0], inside.outside(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": inside.outside(kwargs["closure"])}
    return None


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    inside: MastersInPlace | None = optimizer.__dict__.pop(INSIDE, None)
    if inside is not None:
        inside.leave()
