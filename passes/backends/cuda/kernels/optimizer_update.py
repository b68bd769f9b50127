"""An optimizer's update of many tensors by Triton on CUDA: unscale, clip, update and round in one pass over memory.

Before: gradients are upcast, checked and unscaled, clipped, a fused kernel runs, weights are rounded.
After: ``look`` over backward's own gradients, and ``update``, for tensors of one dtype and alignment two launches each.
Whether a gradient was infinite, the scale, step counts and rates are read on the device: nothing waits for it.

Bytes per parameter, computed, of AdamW with a loss scale, bf16 gradients and copies: 2 (look) + 28 (update: value,
gradient and moments read, 14; value, moments and copy written, 14) = 30. By torch's kernels: 6 (upcast gradient)
+ 8 (check and unscale) + 28 (fused update) + 6 (cast) = 48; clipping to a norm adds 12 there, and nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_graph.passes.backends.cuda.kernels.pointer_tables import bits_of, table_of
from amp_graph.passes.backends.cuda.kernels.update_by_torch import update_by_torch
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.native.triton_loader import launch, require
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = "amp_graph.passes.backends.cuda.kernels.optimizer_update_source"
BLOCK = 4096  # elements per program of 8 warps: 16 per thread
KINDS = 3  # of state, at most
FACTORS = 12
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OPTIONS = ("weight_decay", "eps", "beta1", "beta2", "momentum", "lr_decay")
FLAGS = ("amsgrad", "momentum", "nesterov", "decay")


class Item(NamedTuple):
    """A parameter and all that its update reads and writes, of one layout."""

    param: Tensor
    grad: Tensor
    states: tuple[Tensor, ...] = ()
    step: Tensor | None = None
    low: Tensor | None = None

    def words(self) -> list[int]:
        """Return the addresses of value, gradient, three kinds of state, step and copy; 0 for none."""
        kinds = [*self.states, *[None] * (KINDS - len(self.states))]
        return [0 if t is None else address_of(t) for t in (self.param, self.grad, *kinds, self.step, self.low)]


Row = tuple[Item, list[int]]  # with its words


def _parts(items: Iterable[Item]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Return the items with elements, by what kernels are compiled for: dtypes, and whether all begin at 16 bytes."""
    found: dict[tuple[str, str, bool], list[Row]] = {}
    for item in items:
        if item.param.numel():
            words = item.words()
            aligned = not any(word % 16 for word in (*words[: 2 + KINDS], words[-1]))
            key = SHORT[item.grad.dtype], "" if item.low is None else SHORT[item.low.dtype], aligned
            found.setdefault(key, []).append((item, words))
    names = ("GRADS", "LOWS", "ALIGNED")
    return [({**dict(zip(names, key, strict=True)), "BLOCK": BLOCK}, rows) for key, rows in found.items()]


def _table(rows: Sequence[Row], numbers: Sequence[float] = ()) -> tuple[Tensor, int]:
    """Return the table of ``rows``, with options, and how many programs it takes."""
    sizes, starts, programs = [item.param.numel() for item, _ in rows], [], 0
    for size in sizes:
        starts.append(programs)
        programs += -(-size // BLOCK)
    columns = list(zip(*(words for _, words in rows), strict=True))
    words = [*starts, *sizes, *(word for column in columns for word in column), *bits_of(numbers)]
    return table_of(words, rows[0][0].param.device, columns[0]), programs


@dataclass(frozen=True)
class Step:
    """What is the same for all tensors: the rule and its options, and the tensors that decide on the device."""

    lr: Tensor | float
    found_inf: Tensor | None
    unscale: Tensor | None
    clip: Tensor | None
    rule: str
    options: dict[str, Any]
    store: bool

    def numbers(self) -> list[float]:
        """Return the options as kernels read them."""
        limit = self.options.get("clip_value")
        sign = -1.0 if self.options.get("maximize") else 1.0
        rate = 0.0 if isinstance(self.lr, Tensor) else float(self.lr)
        found = [rate, *(float(self.options.get(name, 0.0)) for name in OPTIONS), sign]
        return [*found, float("inf") if limit is None else float(limit)]


def update(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[Tensor],
    steps: list[Tensor],
    lows: list[Tensor],
    with_low: list[int],
    lr: Tensor | float,
    found_inf: Tensor | None,
    unscale: Tensor | None,
    clip: Tensor | None,
    *,
    rule: str,
    store: bool = False,
    **options: Any,
) -> None:
    """Do what ``one_pass_update_`` does; torch updates tensors for which the kernel cannot be launched.

    lr: a number, or a 0-d tensor of the device, fp32 or fp64. store: write unscaled gradients, too, where the step is
    not skipped. A skipped step leaves all but copies unchanged; it writes these again, from unchanged values.
    """
    count, copies = len(params), dict(zip(with_low, lows, strict=True))
    kinds = [states[i : i + count] for i in range(0, len(states), count)]
    laid = [laid_out_as(p, g) for p, g in zip(params, grads, strict=True)]
    items = [
        Item(p, laid[i], tuple(kind[i] for kind in kinds), steps[i] if steps else None, copies.get(i))
        for i, p in enumerate(params)
    ]
    step = Step(lr, found_inf, unscale, clip, rule, options, store)
    for constants, rows in _parts(items):
        try:
            _launch(rows, step, constants)
        except CompilerError:
            for item, _ in rows:
                update_by_torch(*item, lr, found_inf, unscale, clip, rule, options, store)
    if steps:
        torch._foreach_add_(steps, 1 if found_inf is None else (found_inf > 0).logical_not().float().reshape(()))
    for grad, own in zip(grads, laid, strict=True):
        if store and own is not grad:
            grad.copy_(own)


def _launch(rows: Sequence[Row], step: Step, constants: dict[str, Any]) -> None:
    """Compute the factors of each tensor, and update all of them."""
    table, programs = _table(rows, step.numbers())
    count, words, options = len(rows), step.rule.split(), step.options
    factors = torch.empty((count, FACTORS), dtype=torch.float32, device=table.device)
    tensors = [step.lr if isinstance(step.lr, Tensor) else None, step.unscale, step.clip]
    has = dict(zip(("RATED", "UNSCALED", "CLIPPED"), (t is not None for t in tensors), strict=True))
    has |= {"DECOUPLED": "decoupled" in words, "COUNTED": rows[0][0].step is not None}
    given = (table, factors, *(factors if t is None else t for t in tensors), count)
    launch(SOURCE, "prepare_kernel", count, given, warps=1, RULE=words[0], **has)
    flags = {flag.upper(): flag in words for flag in FLAGS}
    flags |= {"CLAMPED": options.get("clip_value") is not None, "FOUND": step.found_inf is not None}
    given = (table, factors, factors if step.found_inf is None else step.found_inf, count)
    launch(SOURCE, "update_kernel", programs, given, RULE=words[0], STORED=step.store, **flags, **constants)


def look(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return whether an element of ``grads`` is infinite or NaN (1.0 or 0.0), and the norm of all, 0-d fp32.

    Squares are added up in fp64, in which those of fp32 do not overflow.
    """
    dense = [g if _is_dense(g) else g.contiguous() for g in grads]
    sums = [torch.zeros(1, dtype=torch.float64, device=grads[0].device)]
    for constants, rows in _parts(Item(g, g) for g in dense):
        try:
            sums.append(_squares(rows, constants))
        except CompilerError:
            sums.extend(item.grad.double().square().sum().reshape(1) for item, _ in rows)
    total = torch.cat(sums).sum()
    return total.isfinite().logical_not().float(), total.sqrt().float()


def _squares(rows: Sequence[Row], constants: dict[str, Any]) -> Tensor:
    table, programs = _table(rows)
    made = torch.empty(programs, dtype=torch.float64, device=table.device)
    own = {name: value for name, value in constants.items() if name != "LOWS"}
    launch(SOURCE, "look_kernel", programs, (table, made, len(rows)), **own)
    return made


def _is_dense(t: Tensor) -> bool:
    found: bool = torch.ops.aten.is_non_overlapping_and_dense(t)
    return found


def kernels(low: torch.dtype) -> SimpleNamespace:
    """Return the functions. Raises CompilerError where no kernel runs, with the reason."""
    require(SOURCE, why_wrong)
    return KERNELS


KERNELS = SimpleNamespace(update=update, look=look)
register_kernel("optimizer_update on cuda", kernels)


def why_wrong(device: torch.device) -> str:
    """Return how the kernels differ from torch on small tensors of ``device``, or ""."""
    values = [torch.linspace(-3, 3, n, dtype=torch.float32, device=device).sin() for n in (5, BLOCK + 3)]
    for rule, kinds in (("adam decoupled bf16", 2), ("sgd decay momentum nesterov bf16", 1)):
        # The interpreter of Triton does not round to bf16, it cuts off.
        for ours, torchs in zip(*(_tried(values, rule, kinds, by) for by in (True, False)), strict=True):
            limit = 1e-5 if ours.dtype == torch.float32 else 2**-7
            if not torch.allclose(ours.float(), torchs.float(), rtol=limit, atol=1e-6):
                return "its numbers are not torch's on this device"
    bad, norm = look([*values, values[0].bfloat16()])
    exact = torch.cat([*(v.double() for v in values), values[0].bfloat16().double()]).norm().float()
    return "" if not bad and torch.allclose(norm, exact, rtol=1e-6) else "its norm is not torch's on this device"


def _tried(values: Sequence[Tensor], rule: str, kinds: int, by_triton: bool) -> list[Tensor]:
    """Return parameters, states and copies behind a step from ``values``, by the kernels or by torch."""
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
    params, grads, lows = [v.cos() for v in values], [v.bfloat16() for v in values], [v.bfloat16() for v in values]
    states, steps = [v.abs() for v in values] * kinds, [v.new_ones(()) for v in values if kinds > 1]
    states = [t.clone() for t in states]
    inverse, clip = values[0].new_full((), 0.5), values[0].new_full((), 0.25)
    if by_triton:
        update(params, grads, states, steps, lows, [0, 1], 0.01, None, inverse, clip, rule=rule, **options)
    else:
        for i, p in enumerate(params):
            own = (grads[i], states[i :: len(values)], steps[i] if steps else None, lows[i])
            update_by_torch(p, *own, 0.01, None, inverse, clip, rule, options)
    return [*params, *states, *lows]
