"""A ``torch.optim`` optimizer's update as operations of a graph: the fused kernels, predicated on ``found_inf``.

Before: ``optimizer.step()``, a Python loop over parameters. After: one ``_fused_adamw_`` a group, which changes
nothing where a gradient was infinite. The state stays the optimizer's own, so its ``state_dict`` is as ever.
Source: torch/optim/{sgd,adam,adagrad}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from amp_graph.master_weights import updated_master
from amp_graph.policy import HALVES

PAGE = 4096  # bytes
ZEROS = 15
STATES = {
    SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
    Adam: lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()), "step"),
    Adagrad: lambda group: ("sum", "step"),
}


def why_not_fused(optimizer: Optimizer) -> str:
    """Return why the update cannot be part of the graph, or "" where it can."""
    kind = type(optimizer)
    if kind not in (SGD, Adam, AdamW, Adagrad):
        return f"{kind.__name__} has no fused kernel that skips bad steps by itself"
    for group in optimizer.param_groups:
        if group.get("dampening") and group["momentum"]:
            return "SGD with dampening treats its first step otherwise"
        if group.get("differentiable"):
            return "differentiable=True"
        if any(p.is_complex() or p.is_sparse for p in group["params"]):
            return "complex or sparse parameters"
        if any(isinstance(group.get(name), Tensor) for name in ("weight_decay", "eps")):
            return "options given as tensors"
    return ""


@dataclass(frozen=True)
class GroupUpdate:
    """The update of one parameter group, for those of its parameters that have gradients."""

    group: dict[str, Any]
    kind: type[Optimizer]
    params: tuple[Tensor, ...]
    states: tuple[tuple[Tensor, ...], ...]  # by name of STATES, each with one tensor a parameter

    def state_names(self) -> tuple[str, ...]:
        """Return the names of ``states`` in the optimizer's own state."""
        return _state_names(self.kind, self.group)

    def apply(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        lr: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """Update ``params`` and ``states`` in place; nothing changes where ``found_inf`` is above 0."""
        g, lists = self.group, [list(s) for s in states]
        params, grads = list(params), list(grads)
        common: dict[str, Any] = {"weight_decay": g["weight_decay"], "maximize": g["maximize"], "found_inf": found_inf}
        if self.kind is SGD:
            if any(p.dtype in HALVES and p.device.type == "cpu" for p in params):  # which torch's kernel hardly changes
                self.apply_pointwise(params, grads, states, lr, found_inf)
                return
            options: dict[str, Any] = {"momentum": g["momentum"], "dampening": 0.0, "nesterov": g["nesterov"]}
            buffers = lists[0] if lists else []
            torch._fused_sgd_(params, grads, buffers, lr=lr, is_first_step=False, **options, **common)
            return
        *moments, steps = lists
        torch._foreach_add_(steps, 1)
        if self.kind is Adagrad:
            options = {"lr": lr, "lr_decay": g["lr_decay"], "eps": g["eps"]}
            torch._fused_adagrad_(params, grads, moments[0], steps, **options, **common)
        else:
            decoupled = self.kind is AdamW or g.get("decoupled_weight_decay", False)
            kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
            largest = moments[2] if len(moments) > 2 else []
            beta1, beta2 = g["betas"]
            options = {"beta1": float(beta1), "beta2": float(beta2), "eps": g["eps"], "amsgrad": g["amsgrad"]}
            kernel(params, grads, moments[0], moments[1], largest, steps, lr=lr, **options, **common)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def apply_pointwise(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        lr: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """Do the same in operations that a compiler fuses into its own kernel; equal to a few last places.

        What is in low precision is computed with in fp32, and rounded once, as in the fused kernels.
        """
        rule = _sgd if self.kind is SGD else _adagrad if self.kind is Adagrad else _adam
        decoupled = self.kind is AdamW or self.group.get("decoupled_weight_decay", False)
        dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
        factors: Any = [lr.to(dtype)] * len(params)
        if rule is _adam:
            factors = _adam_factors(self.group, states[-1], lr, decoupled, dtype).unbind(1)
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            targets = [p, *(s[i] for s in states)]
            g, start, *old = (t.float() if t.dtype in HALVES else t for t in (grad, *targets))
            g = -g if self.group["maximize"] else g
            if self.group["weight_decay"] and not decoupled:
                g = g + self.group["weight_decay"] * start
            made = rule(self.group, start, g, old, factors[i])
            for target, new in zip(targets, made, strict=True):
                target.copy_(new if found_inf is None else torch.where(found_inf > 0, target, new))


def _sgd(group: dict[str, Any], p: Tensor, g: Tensor, old: list[Tensor], lr: Tensor) -> list[Tensor]:
    if not old:
        return [p - lr * g]
    buffer = group["momentum"] * old[0] + g
    return [p - lr * (g + group["momentum"] * buffer if group["nesterov"] else buffer), buffer]


def _adagrad(group: dict[str, Any], p: Tensor, g: Tensor, old: list[Tensor], lr: Tensor) -> list[Tensor]:
    total, step = old[0] + g * g, old[1] + 1
    rate = lr / (1 + (step - 1) * group["lr_decay"])
    return [p - rate * g / (total.sqrt() + group["eps"]), total, step]


def _adam_factors(
    group: dict[str, Any], steps: Sequence[Tensor], lr: Tensor, decoupled: bool, dtype: torch.dtype
) -> Tensor:
    """Return for each parameter what all its elements are multiplied by, [3, n] in ``dtype``.

    lr / (1 - beta1**t), 1 / sqrt(1 - beta2**t), and what a decoupled weight decay leaves of the parameter, or 1.
    """
    beta1, beta2 = (float(b) for b in group["betas"])
    counts = torch.stack(list(steps)) + 1
    rates, roots = lr.to(dtype) * (1 / (1 - beta1**counts)), (1 - beta2**counts).rsqrt().to(dtype)
    kept = (1 - lr * (group["weight_decay"] if decoupled else 0.0)).to(dtype)
    found = torch.stack([rates, roots, kept.expand_as(counts)])
    # A sum with zeros: changes nothing, but is no pointwise operation, which a compiler would inline into its loops
    # over parameters, with two powers for every few elements. Sums of 8 and fewer Inductor writes out, and inlines.
    return torch.nn.functional.pad(found[None], (0, 0, 0, 0, 0, ZEROS)).sum(0)


def _adam(group: dict[str, Any], p: Tensor, g: Tensor, old: list[Tensor], factors: Tensor) -> list[Tensor]:
    beta1, beta2 = (float(b) for b in group["betas"])
    rate, root, kept = factors.unbind()
    first, second = old[0].lerp(g, 1 - beta1), old[1] * beta2 + (1 - beta2) * g * g
    largest = [torch.maximum(old[2], second)] if len(old) > 3 else []
    scaled = (largest[0] if largest else second).sqrt() * root
    moved = p * kept - rate * first / (scaled + group["eps"])
    return [moved, first, second, *largest, old[-1] + 1]


def group_updates(optimizer: Optimizer, trained: Sequence[Tensor]) -> list[GroupUpdate]:
    """Return the updates of ``optimizer`` for the parameters in ``trained``; makes the state that is missing."""
    wanted = {id(p) for p in trained}
    found = []
    for group in optimizer.param_groups:
        params = tuple(p for p in group["params"] if id(p) in wanted)
        if not params:
            continue
        kind = type(optimizer)
        names = _state_names(kind, group)
        for p in params:
            master = updated_master(p)
            _make_state(optimizer.state[p], p if master is None else master, names)
        states = tuple(tuple(optimizer.state[p][name] for p in params) for name in names)
        found.append(GroupUpdate(group, kind, params, states))
    return found


def _state_names(kind: type[Optimizer], group: dict[str, Any]) -> tuple[str, ...]:
    return STATES[Adam if kind is AdamW else kind](group)


def _make_state(state: dict[str, Any], parameter: Tensor, names: Sequence[str]) -> None:
    """Make what torch.optim makes at its first step, where the fused kernels want it."""
    for name in names:
        if name == "step":
            known = state.get("step", 0.0)
            state["step"] = torch.as_tensor(known, dtype=torch.float32).to(parameter.device)
        elif state.get(name) is None:
            state[name] = zeros_beside(parameter)
        elif state[name].dtype != parameter.dtype:  # Adagrad makes its own in advance: before a model is lowered
            state[name] = state[name].to(parameter.dtype)


def zeros_beside(parameter: Tensor) -> Tensor:
    """Return zeros in shape, dtype and layout of ``parameter``, on a CPU at the same place within a page of memory.

    A CPU that looks for what it has yet to write compares no more than the place within a page: kernels that go through
    parameter and state together would wait for their own writes to the one before they read the other. A step of three
    layers of 256 took 437 us, and takes 417; states that do not fit into caches gain nothing.
    """
    dense = type(parameter) in (Tensor, torch.nn.Parameter) and torch.ops.aten.is_non_overlapping_and_dense(parameter)
    size = parameter.element_size()
    if not dense or parameter.device.type != "cpu" or parameter.numel() * size < 4 * PAGE:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    room = torch.zeros(parameter.numel() + PAGE // size, dtype=parameter.dtype)
    start = (parameter.data_ptr() - room.data_ptr()) % PAGE // size
    made = torch.empty(0, dtype=parameter.dtype)
    return made.set_(room.untyped_storage(), start, parameter.shape, parameter.stride())
