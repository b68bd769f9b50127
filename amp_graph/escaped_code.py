"""How code that escapes the capture of one model runs, by its policy.

Before: ``print(x)`` in a converted ``forward``. After: that call runs in ``region()``, which is ``torch.autocast`` with
the modules that stay fp32 kept out of it, and its result goes through ``finished``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.devices import device_of_model
from amp_graph.escape import autocast_region, widened_outputs
from amp_graph.kept_modules import KeptModules, kept_in_fp32
from amp_graph.policy import Policy

_here = threading.local()  # whether this thread is in a region


class EscapedCode:
    """What of ``model`` is not captured: cast by autocast, or in fp32."""

    def __init__(self, model: torch.nn.Module, policy: Policy) -> None:
        self.model, self.policy = model, policy
        self._kept: KeptModules | None = None

    @property
    def is_cast(self) -> bool:
        """Whether it runs under autocast."""
        return self.policy.runs_escaped == "autocast"

    @property
    def asks_dtypes(self) -> bool:
        """Whether all is captured under autocast: lists that reproduce PyTorch's want its dtypes read."""
        return self.is_cast and self.policy.op_list("cpu").unlisted != "opaque"

    @property
    def how(self) -> str:
        """How it runs: "in fp32", or under which autocast."""
        if not self.is_cast:
            return "in fp32"
        kind, dtype = self.kind()
        return f"under torch.autocast({kind!r}, {dtype})"

    def kind(self) -> tuple[str, torch.dtype]:
        """Return the device and the low precision for which autocast is switched on."""
        kind = device_of_model(self.model) or "cpu"
        return kind, self.policy.torch_dtype(kind)

    def look_again(self) -> None:
        """Look anew for the modules that stay fp32."""
        self._kept = None

    @contextmanager
    def region(self) -> Iterator[tuple[str, torch.dtype]]:
        """Run what escapes as the policy wants it."""
        kind, dtype = self.kind()
        if self._kept is None:
            self._kept = KeptModules(kept_in_fp32(self.model, self.policy, kind), kind)
        outer = getattr(_here, "is_running", False)
        _here.is_running = True
        try:
            with self._kept.standing(), autocast_region(kind, dtype):
                yield kind, dtype
        finally:
            _here.is_running = outer

    @staticmethod
    def is_running() -> bool:
        """Say whether this thread runs code that escaped the capture of some converted model."""
        return bool(getattr(_here, "is_running", False))

    def finished(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what the user sees its captured dtype: fp32, where it is no input, parameter or buffer."""
        if not self.policy.keep_outputs:
            return result

        def own() -> set[int]:
            return set(map(id, (*tree_leaves((args, kwargs)), *self.model.parameters(), *self.model.buffers())))

        return widened_outputs(result, self.kind()[1], own)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without any capture."""
        if not self.is_cast:
            return forward(*args, **kwargs)
        with self.region():
            result = forward(*args, **kwargs)
        return self.finished(result, args, kwargs)
