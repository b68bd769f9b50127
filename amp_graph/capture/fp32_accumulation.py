"""Makes low-precision matmuls on CUDA accumulate in fp32, in converted graphs and their backward.

Before: cuBLAS may split a long sum (split-K) and add the parts in bf16 or fp16, which PyTorch allows by default. After
``accumulating_in_fp32(run)``: it may not while ``run`` or its backward runs; everything else keeps the process's
settings. Source of the settings: torch/backends/cuda/__init__.py (cuBLASModule).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import add_hook, at_end_of_backward, number_of_backward
from amp_graph.passes.torch_compat.devices import set_sums_of_products, sums_of_products


class _Held:
    """The current users of fp32 accumulation: a count of running calls, and the ids of running backward passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls, self._backwards = 0, set[int]()
        self._before: tuple[Any, ...] | None = None  # the process's own settings; None while they are in force

    def begin(self) -> None:
        """Require fp32 accumulation until ``end``."""
        with self._lock:
            if self._backwards and not self._calls and number_of_backward() < 0:
                self._backwards.clear()  # left behind by a backward that raised
            self._calls += 1
            self._set()

    def end(self) -> None:
        """Undo one ``begin``."""
        with self._lock:
            self._calls -= 1
            self._give_back()

    def in_backward(self, _: Tensor) -> None:
        """Require fp32 accumulation for the rest of this backward pass; a hook on a graph's outputs calls it."""
        number = number_of_backward()
        with self._lock:
            if number in self._backwards:
                return
            self._backwards.add(number)
            self._set()
        at_end_of_backward(lambda: self._end_of(number))

    def _end_of(self, number: int) -> None:
        with self._lock:
            self._backwards.discard(number)
            self._give_back()

    def _set(self) -> None:
        if self._before is not None:
            return
        self._before = (_, fp16_in_parts), (_, bf16_in_parts), _ = sums_of_products()
        set_sums_of_products(((False, fp16_in_parts), (False, bf16_in_parts), False))

    def _give_back(self) -> None:
        if self._before is not None and not self._calls and not self._backwards:
            set_sums_of_products(self._before)
            self._before = None


HELD = _Held()


def accumulating_in_fp32(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``, a graph on a CUDA device, so that its matmuls accumulate in fp32, in backward as well.

    The settings are per process: matmuls of other threads accumulate in fp32 meanwhile, too.
    """

    def held(*args: Any) -> Any:
        HELD.begin()
        try:
            found = run(*args)
        finally:
            HELD.end()
        if torch.is_grad_enabled():
            for tensor in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    add_hook(tensor, HELD.in_backward)
        return found

    return held
