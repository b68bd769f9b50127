"""The custom operators of the one-pass update, implemented in C, and on CUDA by Triton.

Before: gradients are upcast one by one and checked, a fused kernel runs, weights are rounded one by one. After:
``look_at_gradients`` and ``one_pass_update_``, which read low-precision gradients and write low-precision copies.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_graph.optim.gradient_layout import laid_out_as
from amp_graph.passes.backends.cuda.kernels import optimizer_update
from amp_graph.passes.native.jit_compiler import load, threads_for
from amp_graph.passes.native.operator_library import OPS as OPS  # re-exported for callers
from amp_graph.passes.native.operator_library import define_operator
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("update_kernel.c")
RULES = ("adam", "sgd", "adagrad")
FLAGS = ("decoupled", "decay", "amsgrad", "momentum", "nesterov")
LOWS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
INFINITE = float("inf")
BY_TRITON = {"cuda"}  # the devices on which Triton's kernels do this


@lru_cache
def library(rule: str) -> ctypes.CDLL:
    """Return the library compiled for ``rule``: words of RULES, FLAGS and LOWS, as in "adam decoupled bf16"."""
    words = rule.split()
    flags = [f"-D{flag.upper()}={int(flag in words)}" for flag in FLAGS]
    low = ["-DLOW_FP16"] if "fp16" in words else []
    return load(SOURCE, (f"-DRULE={words[0].upper()}", *flags, *low))


def one_pass_update_(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[Tensor],
    steps: list[Tensor],
    lows: list[Tensor],
    with_low: list[int],
    lr: Tensor,
    found_inf: Tensor | None,
    unscale: Tensor | None,
    clip: Tensor | None,
    *,
    rule: str,
    weight_decay: float = 0.0,
    eps: float = 0.0,
    beta1: float = 0.0,
    beta2: float = 0.0,
    momentum: float = 0.0,
    lr_decay: float = 0.0,
    maximize: bool = False,
    clip_value: float | None = None,
    rows: list[Tensor] | None = None,
    with_rows: list[int] | None = None,
    alone: list[int] | None = None,
) -> None:
    """Update parameters, state and low-precision copies in place; no change if ``found_inf`` is above 0.

    params: fp32. grads: fp32 or the low dtype of ``rule``. states: fp32, one per parameter and kind of state.
    steps: 0-d fp32, one per parameter or none. lows: the copies of the parameters with indices ``with_low``.
    A parameter, its gradient, state and copy have the same dense layout. lr: 0-d fp64. found_inf, unscale, clip: 0-d
    fp32; gradients are multiplied by ``unscale``, then by ``clip``, then clamped to ``clip_value``.
    On CUDA ``lr`` may be fp32, and there are no rows.
    rows: results of ``gradient_rows``, slots and rows alternating, added to the gradients with indices ``with_rows``;
    gradients with indices ``alone`` consist of rows only.
    """
    if params[0].device.type in BY_TRITON:
        by_name: dict[str, Any] = {
            "weight_decay": weight_decay,
            "eps": eps,
            "beta1": beta1,
            "beta2": beta2,
            "momentum": momentum,
        }
        by_name |= {"lr_decay": lr_decay, "maximize": maximize, "clip_value": clip_value}
        own = (params, grads, states, steps, lows, with_low, lr, found_inf, unscale, clip)
        optimizer_update.update(*own, rule=rule, **by_name)
        return
    count = len(params)
    kinds = [addresses(states[i : i + count]) for i in range(0, len(states), count)]
    copies = [0] * count
    for i, low in zip(with_low, lows, strict=True):
        copies[i] = address_of(low)
    columns = (*kinds, *[repeat(0)] * (3 - len(kinds)), addresses(steps) if steps else repeat(0), copies)
    added = Rows(rows, with_rows, alone)
    laid = _laid_as(params, grads, added)  # keep it alive while C reads it
    table = _table(params, laid, added, *columns)
    sign, limit = -1.0 if maximize else 1.0, INFINITE if clip_value is None else clip_value
    options = array("d", (weight_decay, eps, beta1, beta2, momentum, lr_decay, sign, limit))
    now = array("q", addresses((lr, found_inf, unscale, clip)))
    given = (place(table), count, _threads(params), place(options), place(now))
    library(rule).update(*given)


def look_at_gradients(
    grads: list[Tensor],
    rule: str,
    rows: list[Tensor] | None = None,
    with_rows: list[int] | None = None,
    alone: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return whether an element of ``grads`` is infinite or NaN (1.0 or 0.0), and the norm of all, 0-d fp32.

    rows, with_rows, alone: as for ``one_pass_update_``.
    """
    if grads[0].device.type in BY_TRITON:
        return optimizer_update.look(grads)
    found_inf, norm = torch.zeros(()), torch.zeros(())
    table = _table(grads, grads, Rows(rows, with_rows, alone))
    library(rule).look(place(table), len(grads), _threads(grads), *map(_pointer, (found_inf, norm)))
    return found_inf, norm


def add_gradients_(
    sums: list[Tensor],
    grads: list[Tensor],
    rule: str,
    rows: list[Tensor] | None = None,
    with_rows: list[int] | None = None,
    alone: list[int] | None = None,
) -> None:
    """Add ``grads``, fp32 or in the low dtype of ``rule``, to fp32 ``sums`` of the same layouts, in place.

    rows, with_rows, alone: as for ``one_pass_update_``.
    """
    added = Rows(rows, with_rows, alone)
    laid = _laid_as(sums, grads, added)
    if sums[0].device.type in BY_TRITON:
        torch._foreach_add_(sums, laid)
        return
    table = _table(sums, laid, added)
    library(rule).add(place(table), len(sums), _threads(sums))


class Rows:
    """Row-sparse gradients, as ``one_pass_update_`` takes them."""

    def __init__(self, tensors: list[Tensor] | None, numbers: list[int] | None, alone: list[int] | None) -> None:
        pairs = zip((tensors or ())[::2], (tensors or ())[1::2], strict=True)
        self.by_number = dict(zip(numbers or (), pairs, strict=True))
        self.alone = set(alone or ())

    def words(self, number: int) -> tuple[int, int, int]:
        """Return the addresses of slots and rows, and a row's width; zeros without rows."""
        if number not in self.by_number:
            return 0, 0, 0
        slots, rows = self.by_number[number]
        return address_of(slots), address_of(rows), rows.shape[1]

    def size(self, number: int, like: Tensor) -> int:
        """Return the gradient's number of elements: of ``like``, or of the whole table."""
        if number not in self.by_number:
            return like.numel()
        slots, rows = self.by_number[number]
        return slots.numel() * rows.shape[1]


def _laid_as(params: Sequence[Tensor], grads: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """Return ``grads`` in the layouts of ``params``, as traced: at run time a kernel may return another layout."""
    return [g if i in rows.alone else laid_out_as(p, g) for i, (p, g) in enumerate(zip(params, grads, strict=True))]


def _table(params: Sequence[Tensor], grads: Sequence[Tensor], rows: Rows, *columns: Iterable[int]) -> array[int]:
    """Return an array of C's struct Parameter: twelve words each."""
    columns = columns or (repeat(0),) * 5
    places = (0 if i in rows.alone else address_of(g) for i, g in enumerate(grads))
    sizes, are_low = (rows.size(i, p) for i, p in enumerate(params)), (g.dtype.itemsize < 4 for g in grads)
    own = zip(addresses(params), places, *columns, sizes, are_low, strict=False)
    return array("q", chain.from_iterable((*words, *rows.words(i)) for i, words in enumerate(own)))


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return the addresses of tensors, 0 for None."""
    return [0 if t is None else address_of(t) for t in tensors]


def place(words: array[Any]) -> ctypes.c_void_p:
    """Return a pointer to ``words``, which must outlive it."""
    return ctypes.c_void_p(words.buffer_info()[0])


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(address_of(tensor))


def _threads(tensors: Sequence[Tensor]) -> int:
    return threads_for(sum(t.numel() for t in tensors))


ROWS = "Tensor[]? rows=None, int[]? with_rows=None, int[]? alone=None"


def _define() -> None:
    define_operator(
        "one_pass_update_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, Tensor(c!)[] steps, "
        "Tensor(d!)[] lows, int[] with_low, Tensor lr, Tensor? found_inf, Tensor? unscale, Tensor? clip, *, str rule, "
        "float weight_decay=0.0, float eps=0.0, float beta1=0.0, float beta2=0.0, float momentum=0.0, "
        f"float lr_decay=0.0, bool maximize=False, float? clip_value=None, {ROWS}) -> ()",
        one_pass_update_,
        lambda *given, **options: None,
    )
    define_operator(
        f"look_at_gradients(Tensor[] grads, str rule, *, {ROWS}) -> (Tensor, Tensor)",
        look_at_gradients,
        lambda grads, rule, **options: (_scalar_like(grads[0]), _scalar_like(grads[0])),
    )
    define_operator(
        f"add_gradients_(Tensor(a!)[] sums, Tensor[] grads, str rule, *, {ROWS}) -> ()",
        add_gradients_,
        lambda *given, **options: None,
    )


def _scalar_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty((), dtype=torch.float32)


_define()
