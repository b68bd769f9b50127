"""When a function with a backward of its own leaves the work to torch, and how it gets torch's gradients.

Before: ``jacobian(vectorize=True)`` and ``vmap`` hand a backward a batch of gradients, which has no memory to read, and
``create_graph=True`` one that is differentiated again. After: each function asks here, and computes by torch's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.passes.torch_compat.dispatch import in_forward_mode, in_transform, is_batched, is_wrapper


def leaves_to_torch(*given: Tensor | None) -> bool:
    """Say whether a forward on ``given`` is for torch's own operations, which know what they stand for.

    That is inside of a transform of ``torch.func``, in forward-mode differentiation, and of tensors without memory of
    their own: those of ``vmap``, and subclasses that wrap others.
    """
    if in_transform() or in_forward_mode():
        return True
    return any(t is not None and (is_batched(t) or is_wrapper(t)) for t in given)


def is_plain(*grads: Tensor | None) -> bool:
    """Say whether a backward of ``grads`` is for torch's own operations.

    That is where they are differentiated again (``create_graph=True``), and where each is a batch of gradients
    (``is_grads_batched=True``).
    """
    return torch.is_grad_enabled() or any(g is not None and is_batched(g) for g in grads)


def gradients_by_torch(
    function: Callable[..., Any], given: Sequence[Any], need: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of ``function(*given)`` for those of ``given`` that ``need`` them, None for the others.

    By torch's own operations, at the gradients ``grads`` of its results; with a graph where gradients are recorded.
    Each of ``given`` counts by itself, even where two are the same tensor.
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
    """Return ``tensor`` as one that gradients stop at, of itself where they go through it, or a leaf."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
