"""Products of low precision add up in fp32 on CUDA, in converted graphs and their backward, whatever else may not.

Before: cuBLAS splits a long sum, and adds its parts up in bf16 or fp16, which PyTorch allows by default. After:
``accumulating_in_fp32(run)``: it may not while ``run`` or its backward is under way; the process's own settings are
those of everything else. Source of the settings: torch/backends/cuda/__init__.py (cuBLASModule).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import at_end_of_backward, number_of_backward
from amp_graph.passes.torch_compat.cuda import set_sums_of_products, sums_of_products


class _Held:
    """Who needs fp32 sums now: calls that are under way, by count, and backward passes, by their number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls, self._backwards = 0, set[int]()
        self._before: tuple[Any, ...] | None = None  # the process's own; None while they are in force

    def begin(self) -> None:
        """Hold until ``end``."""
        with self._lock:
            if self._backwards and not self._calls and number_of_backward() < 0:
                self._backwards.clear()  # left by one that raised
            self._calls += 1
            self._set()

    def end(self) -> None:
        """Let go of what one ``begin`` holds."""
        with self._lock:
            self._calls -= 1
            self._give_back()

    def in_backward(self, _: Tensor) -> None:
        """Hold for the rest of the backward pass that calls this, as a hook of what a graph returned."""
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
    """Return what calls ``run``, a graph on a CUDA device, with all sums of products in fp32, in its backward as well.

    The settings are the process's: what other threads multiply meanwhile is added up in fp32, too.
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
                    tensor.register_hook(HELD.in_backward)
        return found

    return held
