"""Keeps the ranks of a script in step in fp16, without a word between them that the script did not say.

Before: a rank's gradients are scaled until its backward ends; DistributedDataParallel averages them before that. After:
each leaf unscales its gradient as it arrives, so that whatever the script or DDP averages is free of a rank's own
scale. A gradient that overflowed on one rank becomes NaN throughout, which each sum and each clipping carries to all
ranks, and each rank skips the steps whose gradients are not finite.

The law: the ranks agree on a skipped step wherever they agree on the gradients of that step, as replicas must. Their
scales may differ, one of them may even run in fp32, and no collective of ours waits for a rank that does not call it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

STATELESS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def are_several() -> bool:
    """Return whether this process is one of several ranks."""
    ranks = torch.distributed
    return bool(ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1)


def keeps_state_of_gradients(module: torch.nn.Module) -> bool:
    """Return whether ``module`` averages gradients by a hook that may keep what it saw, and with that an infinity."""
    return any(getattr(hook, "__name__", "") not in STATELESS for hook, _ in getattr(module, "_comm_hooks", ()))


@contextlib.contextmanager
def unscaled_on_arrival(leaves: Sequence[Tensor], inverse: Tensor) -> Iterator[None]:
    """Multiply the gradients that ``leaves`` receive by ``inverse`` before they are accumulated or averaged."""
    hooks = [leaf.register_hook(lambda grad: grad * inverse) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def spread_overflow(leaves: Iterable[Tensor]) -> None:
    """Make gradients that overflowed NaN throughout: clipping an infinity to a value would hide it from other ranks."""
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.fill_(torch.nan)


def are_finite(params: Iterable[Tensor]) -> bool:
    """Return whether all gradients of ``params`` are finite; waits for each device once."""
    flags: dict[torch.device, list[Tensor]] = {}
    for grad in (p.grad for p in params if p.grad is not None):
        values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
        flags.setdefault(grad.device, []).append(values.isfinite().all())
    return all(bool(torch.stack(found).all()) for found in flags.values())
