"""Unscales, clips, updates and rounds weights in one pass over memory: on the CPU if a C compiler is installed.

On CUDA by Triton, where its kernels are switched on.

Before: upcast gradients, ``check_finite_and_unscale_``, ``_fused_adamw_``, ``_foreach_copy_``: each reads and writes
all parameters. After: ``look_at_gradients`` over backward's own gradients, and ``one_pass_update_``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW

from amp_graph.errors import CaptureError, CompilerError
from amp_graph.optim.gradient_layout import is_dense
from amp_graph.optim.native_update_ops import BY_TRITON, LOWS, OPS, library
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.backends.cuda.kernels import optimizer_update
from amp_graph.passes.profitability.cuda_kernel_thresholds import (
    LEAST_SPARED,
    OF_COPIES,
    OF_GRADIENTS,
    update_kernel_is_profitable,
)
from amp_graph.passes.profitability.thresholds import one_pass_is_profitable

WAYS = ("auto", "one_pass", "torch")


@dataclass(frozen=True)
class OnePass:
    """The one-pass update: the rule of each group, and the low dtype of gradients and copies.

    Exactness: parameters, state and copies are those of torch's fused kernels on widened gradients, bit for bit; the
    last elements of a tensor, fewer than a vector's 16, to a last place, and the norm that clips to a few. On CUDA all
    elements to a few last places.

    takes_rows: whether gradients of embedding tables may be rows.
    """

    rules: tuple[str, ...]
    low: torch.dtype
    takes_rows: bool = True

    def takes(self, grad: Tensor) -> Tensor:
        """Return ``grad`` in a dtype that the pass reads: unchanged, or fp32."""
        return grad if grad.dtype in (torch.float32, self.low) else grad.float()

    def add(self, sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Accumulate the gradients of a micro-batch, in fp32."""
        OPS.add_gradients_(list(sums), list(grads), self.rules[0])

    def finish(
        self,
        updates: Sequence[GroupUpdate],
        given: Sequence[GroupTensors],
        rates: Sequence[Tensor],
        inverse: Tensor | None,
        clip_norm: float | None,
        clip_value: float | None,
        norm_into: Tensor | None = None,
    ) -> Tensor | None:
        """Update all groups; return ``found_inf``. Without a loss scale, it and ``inverse`` are None.

        norm_into: 0-d, gets the norm of the unscaled gradients where ``clip_norm`` is given.
        """
        found_inf, clip = None, None
        if inverse is not None or clip_norm is not None:
            grads = [grad for group in given for grad in group.grads]
            found_inf, norm = OPS.look_at_gradients(grads, self.rules[0])
            if clip_norm is not None:
                total = norm if inverse is None else norm * inverse
                clip = torch.clamp(clip_norm / (total + 1e-6), max=1.0)
                if norm_into is not None:
                    norm_into.copy_(total)
            found_inf = None if inverse is None else found_inf
        for update, group, lr, rule in zip(updates, given, rates, self.rules, strict=True):
            options = {**options_of(update), **({} if clip_value is None else {"clip_value": clip_value})}
            OPS.one_pass_update_(*group.arguments(), lr, found_inf, inverse, clip, rule=rule, **options)
        return found_inf


@dataclass(frozen=True)
class GroupTensors:
    """The tensors of one group in a step; ``lows`` has None for a parameter without a copy."""

    params: list[Tensor]
    grads: list[Tensor]
    states: Sequence[Sequence[Tensor]]  # the last is the step counts, if the rule has them
    lows: list[Tensor | None]
    counted: bool

    def arguments(self) -> tuple[Any, ...]:
        """Return them as ``one_pass_update_`` takes them."""
        kinds, steps = (self.states[:-1], self.states[-1]) if self.counted else (self.states, ())
        with_low = [i for i, low in enumerate(self.lows) if low is not None]
        flat = [t for kind in kinds for t in kind]
        return self.params, self.grads, flat, list(steps), [self.lows[i] for i in with_low], with_low


def rule_of(update: GroupUpdate, low: torch.dtype) -> str:
    """Return the rule of a group in words: "adam decoupled bf16"."""
    group, kind = update.group, update.kind
    decoupled = kind is AdamW or group.get("decoupled_weight_decay", False)
    flags = {
        "decoupled": decoupled,
        "decay": group["weight_decay"] and not decoupled,
        "amsgrad": group.get("amsgrad"),
        "momentum": group.get("momentum"),
        "nesterov": group.get("momentum") and group.get("nesterov"),
    }
    name = "sgd" if kind is SGD else "adagrad" if kind is Adagrad else "adam"
    return " ".join([name, *(flag for flag, is_set in flags.items() if is_set), LOWS[low]])


def options_of(update: GroupUpdate) -> dict[str, Any]:
    """Return the nonzero options of a group as ``one_pass_update_`` takes them."""
    group = update.group
    found = {name: group.get(name, 0.0) for name in ("weight_decay", "eps", "momentum", "lr_decay", "maximize")}
    found["beta1"], found["beta2"] = (float(beta) for beta in group.get("betas", (0.0, 0.0)))
    return {name: value for name, value in found.items() if value}


def check_way(update: str, compile: Any) -> None:
    """Raise CaptureError for an unknown ``update``, or one that ``compile`` does not support."""
    if update not in WAYS or (update == "one_pass" and compile != "eager"):
        raise CaptureError(
            f"TrainStep: update={update!r} with compile={compile!r}\n"
            "  legal: 'auto', 'torch', and with compile='eager' 'one_pass'\n  fix:   leave update out"
        )


def plan_one_pass(
    way: str,
    compile: Any,
    updates: Sequence[GroupUpdate],
    target_of: Callable[[Tensor], Tensor],
    lows: Mapping[int, list[Tensor]],
    tables: Collection[int] = (),
) -> tuple[OnePass | None, str]:
    """Return the one-pass update, or None; and a description of the update.

    way: one of WAYS; "auto" uses it if possible and profitable. target_of: the tensor updated for a parameter. lows:
    the copies of each parameter, by id. tables: the ids of embedding tables. Raises CaptureError or CompilerError if
    "one_pass" is impossible.
    """
    if compile != "eager":
        return None, "pointwise operations, for the compiler"
    why = "as asked" if way == "torch" else _why_not(updates, target_of, lows)
    by_triton = not why and is_by_triton(target_of(updates[0].params[0]).device)
    # Fewer casts, and in C rows instead of dense gradients of tables.
    gains = {*lows, *(() if by_triton else tables)}
    elements = sum(target_of(p).numel() for update in updates for p in update.params if id(p) in gains)
    if not why and way == "auto":
        why = why_too_few(by_triton, elements, OF_COPIES + OF_GRADIENTS)
    one_pass = why or _compiled(way, updates, lows, by_triton)
    if isinstance(one_pass, str) and way == "one_pass":
        raise CaptureError(
            f"TrainStep: update='one_pass', but {one_pass}\n  legal: SGD, Adam, AdamW and Adagrad in eager mode, on "
            "the CPU, or by Triton on CUDA, over fp32 weights with copies in one low dtype\n  fix:   update='auto'"
        )
    return (None, f"torch's kernels: {one_pass}") if isinstance(one_pass, str) else (one_pass, "one pass")


def is_by_triton(device: torch.device) -> bool:
    """Return whether the pass over tensors of ``device`` is Triton's."""
    return device.type in BY_TRITON


def why_too_few(by_triton: bool, elements: int, spared: int) -> str:
    """Return why the pass does not pay for so many ``elements`` with copies, or "".

    spared: by Triton, how many bytes each of them moves less.
    """
    if not by_triton:
        few = not one_pass_is_profitable("cpu", elements)
        return f"{elements:,} elements are too few to be worth compiling" if few else ""
    if update_kernel_is_profitable(spared * elements):
        return ""
    return f"one pass would spare {spared * elements:,} bytes, fewer than {LEAST_SPARED:,}"


def _compiled(
    way: str, updates: Sequence[GroupUpdate], lows: Mapping[int, list[Tensor]], by_triton: bool
) -> OnePass | str:
    low = next(copy.dtype for copies in lows.values() for copy in copies)
    rules = tuple(rule_of(update, low) for update in updates)
    if by_triton:
        return why_no_kernels(low) or OnePass(rules, low, takes_rows=False)
    try:
        for rule in rules:
            library(rule)
    except CompilerError as error:
        if way == "one_pass":
            raise
        return str(error).partition("\n")[0]
    return OnePass(rules, low)


def why_no_kernels(low: torch.dtype) -> str:
    """Return why Triton's kernels do not run here, or ""."""
    try:
        optimizer_update.kernels(low)
    except CompilerError as error:
        return str(error).partition("\n")[0]
    return ""


def _why_not(
    updates: Sequence[GroupUpdate], target_of: Callable[[Tensor], Tensor], lows: Mapping[int, list[Tensor]]
) -> str:
    if not updates:
        return "the optimizer is called after the graph, or trains nothing"
    if len({copy.dtype for copies in lows.values() for copy in copies}) != 1:
        return "weights have no low-precision copies, or copies in several dtypes"
    device = target_of(updates[0].params[0]).device
    for update in updates:
        if why := why_not_flat(update, device, target_of):
            return why
        for p in update.params:
            target = target_of(p)
            if not all(_is_alike(low, target, low.dtype) for low in lows.get(id(p), ())):
                return f"the copy of a parameter of shape {tuple(p.shape)} has another layout"
    return ""


def why_not_flat(update: GroupUpdate, device: torch.device, target_of: Callable[[Tensor], Tensor] = lambda p: p) -> str:
    """Return why the pass over tensors of ``device`` does not support the parameters or state of a group, or ""."""
    kinds = [kind for kind, name in zip(update.states, update.state_names(), strict=True) if name != "step"]
    for i, p in enumerate(update.params):
        target = target_of(p)
        if not _is_flat(target, device) or not all(_is_alike(kind[i], target, torch.float32) for kind in kinds):
            return f"a parameter of shape {tuple(p.shape)} or its state is not dense fp32 on {place_of(device)}"
    if any(step.device != device or step.dtype != torch.float32 for step in _steps_of(update)):
        return f"a step count is not fp32 on {place_of(device)}"
    return ""


def place_of(device: torch.device) -> str:
    """Return the name of the device where the pass runs, for people."""
    return str(device) if device.type in BY_TRITON - {"cpu"} else "the CPU"


def _steps_of(update: GroupUpdate) -> Sequence[Tensor]:
    return update.states[-1] if "step" in update.state_names() else ()


def _is_flat(t: Tensor, device: torch.device) -> bool:
    runs = device.type == "cpu" or device.type in BY_TRITON
    return runs and t.device == device and t.dtype == torch.float32 and is_dense(t)


def _is_alike(t: Tensor, like: Tensor, dtype: torch.dtype) -> bool:
    return t.device == like.device and t.dtype == dtype and (t.shape, t.stride()) == (like.shape, like.stride())
