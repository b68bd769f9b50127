"""A ``torch.optim`` optimizer's update as operations of a graph: the fused kernels, predicated on ``found_inf``.

Before: ``optimizer.step()``, a Python loop over parameters. After: one ``_fused_adamw_`` per group, which changes
nothing if a gradient was infinite. The state stays the optimizer's own, so ``state_dict`` works as usual.
Source: torch/optim/{sgd,adam,adagrad}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from amp_graph.optim.master_weights import updated_master
from amp_graph.passes.loss_scaling.gradient_layout import lies_as
from amp_graph.passes.sharding.shard_parameters import rows_of
from amp_graph.passes.torch_compat.operators import (
    foreach_add_,
    foreach_copy_,
    fused_adagrad_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)
from amp_graph.passes.torch_compat.optimizers import steps_otherwise
from amp_graph.policy_words import HALVES

SEVERAL = 16
LINE = 64  # bytes: no vector of a CPU has more, and its kernels divide tensors among threads at such
BLOCK = 1 << 19  # elements that the CPU updates at a time: see benchmarks/update_time.py
Kernel = Callable[[list[Tensor], list[Tensor], list[list[Tensor]]], Any]  # of parameters, gradients, state by kind
STATES = {
    SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
    Adam: lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()), "step"),
    Adagrad: lambda group: ("sum", "step"),
}


def is_dense(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is dense in memory, in any order of dimensions; a DTensor is not."""
    plain = tensor.layout is torch.strided and not hasattr(tensor, "to_local")
    return plain and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def why_not_fused(optimizer: Optimizer) -> str:
    """Return why the update cannot be part of the graph, or "" if it can."""
    kind = type(optimizer)
    if kind not in (SGD, Adam, AdamW, Adagrad):
        return f"{kind.__name__} has no fused kernel that skips bad steps by itself"
    for group in optimizer.param_groups:
        if group.get("dampening") and group["momentum"]:
            return "SGD with dampening treats its first step differently"
        if group.get("differentiable"):
            return "differentiable=True"
        if any(p.is_complex() or p.is_sparse for p in group["params"]):
            return "complex or sparse parameters"
        if any(isinstance(group.get(name), Tensor) for name in ("weight_decay", "eps")):
            return "options given as tensors"
    return steps_otherwise(optimizer)


class Place(NamedTuple):
    """The elements before a shard, in the whole tensor, and of the whole tensor."""

    start: int
    whole: int

    def ends(self, count: int, line: int) -> list[tuple[int, int, int, int]]:
        """Return the parts of a shard of ``count`` elements that a kernel must not take as they are.

        It rounds what is behind the last whole vector otherwise, and must do so where that is in the whole. A part is
        (start, stop, elements to put before it, elements in all): at the end of the whole as many as there are behind
        its last line, and else a line.
        """
        behind = self.whole % line
        last = self.whole - behind - self.start
        stop = min(max(last, 0), count)
        parts = (stop - stop % line, stop, 0, line), (stop, count, stop - last, behind)
        return [part for part in parts if part[0] < part[1]]


def place_of(parameter: Any) -> Place | None:
    """Return where this rank's rows of ``parameter`` are, if it is sharded on a CPU."""
    if not hasattr(parameter, "to_local") or parameter.device.type != "cpu":
        return None
    mesh, last = parameter.device_mesh, parameter.device_mesh.ndim - 1
    first = rows_of(parameter.shape, mesh.size(last)) * mesh.get_local_rank(last)
    return Place(min(first, len(parameter)) * prod(parameter.shape[1:]), parameter.numel())


@dataclass(frozen=True)
class GroupUpdate:
    """The update of one parameter group's parameters that have gradients."""

    group: dict[str, Any]
    kind: type[Optimizer]
    params: tuple[Tensor, ...]
    names: tuple[str, ...]  # of its states in the optimizer's own state
    states: tuple[tuple[Tensor, ...], ...]  # by name, one tensor per parameter
    places: tuple[Place | None, ...] = ()  # one per parameter: of shards, in the whole tensors

    def apply(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        lr: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """Update ``params`` and ``states`` in place; no change if ``found_inf`` is above 0."""
        odd = {i for i, p in enumerate(params) if not self._is_for_kernel(p, grads[i], *(s[i] for s in states))}
        places = dict(enumerate(self.places))  # rows that are updated apart follow, and have none
        fused = partial(self._apply_fused, [places.get(i) for i in range(len(params)) if i not in odd])
        for apply, own in ((self.apply_pointwise, odd), (fused, set(range(len(params))) - odd)):
            if own:
                of = [[t for i, t in enumerate(tensors) if i in own] for tensors in (params, grads, *states)]
                apply(of[0], of[1], of[2:], lr, found_inf)

    def _is_for_kernel(self, p: Tensor, *others: Tensor) -> bool:
        """Return whether torch's fused kernel is correct for ``p``: it ignores strides and gaps."""
        if self.kind is SGD and p.dtype in HALVES and p.device.type == "cpu":  # hardly changes it
            return False
        return is_dense(p) and all(not t.dim() or lies_as(p, t) for t in others)

    def _apply_fused(
        self,
        places: Sequence[Place | None],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        lr: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        steps = states[-1] if "step" in self.names else []
        run = self._kernel(lr, found_inf)
        if steps:
            foreach_add_(steps, 1)
        every, copies = _as_in_whole([params, grads, *states], places)
        for some, same, *kinds in _in_one_dtype(every):
            run(some, same, kinds)
        for target, new in copies:
            target.copy_(new)
        if steps and found_inf is not None:
            foreach_add_(steps, [found_inf] * len(steps), alpha=-1)

    def _kernel(self, lr: Tensor, found_inf: Tensor | None) -> Kernel:
        """Return torch's kernel with its options."""
        g = self.group
        common: dict[str, Any] = {"weight_decay": g["weight_decay"], "maximize": g["maximize"], "found_inf": found_inf}
        if self.kind is SGD:
            common |= {"momentum": g["momentum"], "dampening": 0.0, "nesterov": g["nesterov"], "is_first_step": False}
            return lambda ps, grads, kinds: fused_sgd_(ps, grads, kinds[0] if kinds else [], lr=lr, **common)
        if self.kind is Adagrad:
            common |= {"lr": lr, "lr_decay": g["lr_decay"], "eps": g["eps"]}
            return lambda ps, grads, kinds: fused_adagrad_(ps, grads, *kinds, **common)
        decoupled = self.kind is AdamW or g.get("decoupled_weight_decay", False)
        kernel: Any = fused_adamw_ if decoupled else fused_adam_
        beta1, beta2 = map(float, g["betas"])
        common |= {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": g["eps"], "amsgrad": g["amsgrad"]}
        return lambda ps, grads, kinds: kernel(
            ps, grads, *kinds[:2], kinds[2] if len(kinds) > 3 else [], kinds[-1], **common
        )

    def apply_pointwise(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        lr: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """Do the same in pointwise operations, which a compiler fuses into one kernel; equal to a few last places.

        Low-precision tensors are computed in fp32 and rounded once, as in the fused kernels.
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


def _as_in_whole(
    kinds: list[list[Tensor]], places: Sequence[Place | None]
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Replace the ends of shards by copies that a kernel rounds as in the whole; return what is to be written back.

    kinds: parameters, gradients, which are not written, and states.
    """
    found, copies = [], []
    for tensors, place in zip(zip(*kinds, strict=True), places, strict=True):
        count = tensors[0].numel()
        ends = [] if place is None else place.ends(count, LINE // tensors[0].itemsize)
        if not ends:
            found.append(tensors)
            continue
        flat = [t.as_strided((count,), (1,)) if t.dim() else t for t in tensors]
        if ends[0][0]:
            found.append(tuple(t[: ends[0][0]] if t.dim() else t for t in flat))
        for start, stop, before, size in ends:
            pad = before, size - before - (stop - start)
            found.append(tuple(F.pad(t[start:stop], pad) if t.dim() else t for t in flat))
            pairs = [(t, new) for i, (t, new) in enumerate(zip(flat, found[-1], strict=True)) if i != 1 and t.dim()]
            copies += [(t[start:stop], new[before:][: stop - start]) for t, new in pairs]
    return [list(kind) for kind in zip(*found, strict=True)], copies


def _in_one_dtype(kinds: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield the parts of an update, by kind, with gradients in the dtype of their parameters.

    What is cast to fp32, and one number for all of a table, is written to memory that each part takes again: it is in
    the caches, and malloc would page in new memory of megabytes each time, which takes 5 % of a GPT's step.
    """
    room: Tensor | None = None
    for params, grads, *states in _blocks(kinds):
        cast = {i: p.numel() for i, p in enumerate(params) if p.dtype is torch.float32 and _differs(p, grads[i])}
        if cast:
            total = sum(cast.values())
            room = params[0].new_empty(total, dtype=torch.float32) if room is None or len(room) < total else room
            parts = zip(cast, room[:total].split([*cast.values()]), strict=True)
            wide = {i: part.as_strided(params[i].shape, params[i].stride()) for i, part in parts}
            foreach_copy_([*wide.values()], [grads[i] for i in cast])
            grads = [wide.get(i, grad) for i, grad in enumerate(grads)]
        yield [params, [grad.to(p.dtype) for p, grad in zip(params, grads, strict=True)], *states]


def _differs(parameter: Tensor, grad: Tensor) -> bool:
    return grad.dtype is not parameter.dtype or grad.dim() < parameter.dim()


def _blocks(kinds: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield the tensors of an update, by kind, in parts of about BLOCK elements on the CPU, so that few are in fp32.

    A large tensor is cut where a kernel's vectors end, which changes no bit.
    """
    if kinds[0][0].device.type != "cpu":
        yield kinds
        return
    some: list[tuple[Tensor, ...]] = []
    for tensors in zip(*kinds, strict=True):
        if some and sum(one[0].numel() for one in some) + tensors[0].numel() > BLOCK:
            yield [list(kind) for kind in zip(*some, strict=True)]
            some = []
        count = tensors[0].numel()
        if count <= BLOCK:
            some.append(tensors)
            continue
        flat = [t.as_strided((count,), (1,)) if t.dim() else t for t in tensors]
        for start in range(0, count, BLOCK):
            yield [[t[start : start + BLOCK] if t.dim() else t] for t in flat]
    if some:
        yield [list(kind) for kind in zip(*some, strict=True)]


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
    """Return the scalar factors of each parameter, [3, n] in ``dtype``.

    lr / (1 - beta1**t), 1 / sqrt(1 - beta2**t), and the factor of a decoupled weight decay, or 1.
    """
    beta1, beta2 = (float(b) for b in group["betas"])
    counts = torch.stack(list(steps)) + 1
    rates, roots = lr.to(dtype) * (1 / (1 - beta1**counts)), (1 - beta2**counts).rsqrt().to(dtype)
    kept = (1 - lr * (group["weight_decay"] if decoupled else 0.0)).to(dtype)
    found = torch.stack([rates, roots, kept.expand_as(counts)])
    # The largest of several that are the same: changes nothing, but is no pointwise operation, which a compiler would
    # inline into its loops over parameters, with two powers for every few elements. Of 8 and fewer Inductor does that,
    # and where they were padded with zeros, it added the first up as often as there were zeros on CUDA (2.11).
    return found.expand(SEVERAL, *found.shape).amax(0)


def _adam(group: dict[str, Any], p: Tensor, g: Tensor, old: list[Tensor], factors: Tensor) -> list[Tensor]:
    beta1, beta2 = (float(b) for b in group["betas"])
    rate, root, kept = factors.unbind()
    first, second = old[0].lerp(g, 1 - beta1), old[1] * beta2 + (1 - beta2) * g * g
    largest = [torch.maximum(old[2], second)] if len(old) > 3 else []
    scaled = (largest[0] if largest else second).sqrt() * root
    moved = p * kept - rate * first / (scaled + group["eps"])
    return [moved, first, second, *largest, old[-1] + 1]


def group_updates(optimizer: Optimizer, trained: Sequence[Tensor]) -> list[GroupUpdate]:
    """Return the updates of ``optimizer`` for the parameters in ``trained``; creates missing state."""
    wanted = {id(p) for p in trained}
    found = []
    for group in optimizer.param_groups:
        params = tuple(p for p in group["params"] if id(p) in wanted)
        if not params:
            continue
        kind = type(optimizer)
        names = STATES[Adam if kind is AdamW else kind](group)
        for p in params:
            master = updated_master(p)
            if names:  # reading it would create an empty one
                _make_state(optimizer.state[p], p if master is None else master, names)
        states = tuple(tuple(optimizer.state[p][name] for p in params) for name in names)
        found.append(GroupUpdate(group, kind, params, names, states, tuple(map(place_of, params))))
    return found


def _make_state(state: dict[str, Any], parameter: Tensor, names: Sequence[str]) -> None:
    """Create the state that torch.optim creates at its first step, on the device that fused kernels need."""
    for name in names:
        if name == "step":
            known = state.get("step", 0.0)
            state["step"] = torch.as_tensor(known, dtype=torch.float32).to(parameter.device)
        elif state.get(name) is None:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        elif not _lies_like(state[name], parameter):
            state[name] = torch.empty_like(parameter).copy_(state[name])


def _lies_like(state: Tensor, parameter: Tensor) -> bool:
    """Return whether both have the same memory order, which fused kernels assume without a check.

    They differ if Adagrad created its state before a model was lowered, if the state was saved from a model in another
    memory format, or if the model's memory format changed. Tensors with gaps are left to kernels that use strides.
    """
    return state.dtype == parameter.dtype and (not is_dense(parameter) or lies_as(parameter, state))
