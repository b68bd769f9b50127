"""When a function with a backward of its own falls back to torch, and how it gets torch's gradients.

Before: ``jacobian(vectorize=True)`` and ``vmap`` pass a backward batched gradients without readable memory, and
``create_graph=True`` needs a backward that can be differentiated again.
After: each function asks here, and falls back to torch's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.passes.torch_compat.dispatch import in_forward_mode, in_transform, is_batched, is_wrapper


def leaves_to_torch(*given: Tensor | None) -> bool:
    """Say whether a forward on ``given`` must use torch's own operations.

    That is so inside ``torch.func`` transforms, in forward-mode differentiation, and for tensors without memory of
    their own: those of ``vmap``, and wrapper subclasses.
    """
    if in_transform() or in_forward_mode():
        return True
    return any(t is not None and (is_batched(t) or is_wrapper(t)) for t in given)


def is_plain(*grads: Tensor | None) -> bool:
    """Say whether a backward of ``grads`` must use torch's own operations.

    That is so if they are differentiated again (``create_graph=True``), or are batched (``is_grads_batched=True``).
    """
    return torch.is_grad_enabled() or any(g is not None and is_batched(g) for g in grads)


def gradients_by_torch(
    function: Callable[..., Any], given: Sequence[Any], need: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of ``function(*given)`` for those of ``given`` that ``need`` them, None for the others.

    Uses torch's own operations, given the gradients ``grads`` of the results; builds a graph if gradients are recorded.
    Each of ``given`` counts separately, even if two are the same tensor.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        apart = [_alone(t) if needed else t for t, needed in zip(given, need, strict=True)]
        results = [r for r in tree_leaves(function(*apart)) if isinstance(r, Tensor)]
        pairs = [(r, g) for r, g in zip(results, grads, strict=False) if g is not None and r.requires_grad]
        wanted = [t for t, needed in zip(apart, need, strict=True) if needed]
        outs, seeds = [r for r, _ in pairs], [g.to(r.dtype) for r, g in pairs]
        found = iter(torch.autograd.grad(outs, wanted, seeds, create_graph=again, allow_unused=True))
    return [next(found) if needed else None for needed in need]


def _alone(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as an alias if gradients go through it, else as a detached leaf that requires them."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
