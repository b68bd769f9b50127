"""What one training step does, beyond its time: casts executed, and bytes kept for backward.

Autocast's casts are seen as well as amp_graph's: both are looked at below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("aten._to_copy", "aten.copy_", "prims.convert_element_type")


class CastCounter(TorchDispatchMode):
    """Counts the conversions between floating-point dtypes that are executed while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let captured graphs run: under an ordinary mode Dynamo silently runs the original code."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and count it where it converts."""
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if name in COPIES:
            before = args[1] if name == "aten.copy_" else args[0]
            self.casts += _converts(before, out)
        return out


def _converts(before: Any, after: Any) -> bool:
    both = (before, after)
    return all(isinstance(t, Tensor) and t.is_floating_point() for t in both) and before.dtype != after.dtype


def casts_and_saved(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, float]:
    """Return the casts of one forward and backward after an update of the weights, and the MB kept between the two.

    Each storage counts once; the model's own parameters and buffers do not count.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    known = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    sizes: dict[StorageWeakRef, int] = {}

    def keep(saved: Tensor) -> Tensor:
        if _storage(saved) not in known:
            sizes[_storage(saved)] = saved.untyped_storage().nbytes()
        return saved

    with CastCounter() as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = forward()
        loss.backward()
    model.zero_grad()
    return counter.casts, sum(sizes.values()) / 1e6


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
