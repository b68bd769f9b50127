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

from amp_graph.passes.torch_compat.autograd import at_end_of_backward, hook_gradients, number_of_backward
from amp_graph.passes.torch_compat.devices import set_sums_of_products, sums_of_products


class _Held:
    """The current users of fp32 accumulation: running calls, and the numbers of running backward passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = set[object]()
        self._before: tuple[Any, ...] | None = None  # the process's own settings; None while they are in force

    def begin(self, user: object) -> None:
        """Require fp32 accumulation until ``end`` of the same user."""
        with self._lock:
            if number_of_backward() < 0 and all(isinstance(one, int) for one in self._users):
                self._users.clear()  # left behind by a backward that raised
            self._users.add(user)
            if self._before is None:
                self._before = (_, fp16_in_parts), (_, bf16_in_parts), _ = sums_of_products()
                set_sums_of_products(((False, fp16_in_parts), (False, bf16_in_parts), False))

    def end(self, user: object) -> None:
        """Give the settings back if there is no other user."""
        with self._lock:
            self._users.discard(user)
            if self._before is not None and not self._users:
                set_sums_of_products(self._before)
                self._before = None

    def in_backward(self, _: Tensor) -> None:
        """Require fp32 accumulation for the rest of this backward pass; a hook on a graph's outputs calls it."""
        number = number_of_backward()
        if number not in self._users:
            self.begin(number)
            at_end_of_backward(lambda: self.end(number))


HELD = _Held()


def accumulating_in_fp32(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``, a graph on a CUDA device, so that its matmuls accumulate in fp32, in backward as well.

    The settings are per process: matmuls of other threads accumulate in fp32 meanwhile, too.
    """

    def held(*args: Any) -> Any:
        user = object()
        HELD.begin(user)
        try:
            found = run(*args)
        finally:
            HELD.end(user)
        if torch.is_grad_enabled():
            hook_gradients(found, HELD.in_backward)
        return found

    return held
