"""``torch.autograd.grad`` that also runs through reentrant activation checkpoints, and leaves ``.grad`` as it was.

Before: ``checkpoint(block, x, use_reentrant=True)``, whose backward refuses ``torch.autograd.grad``. After:
``gradients(model, [loss], inputs)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import REENTRANT


def gradients(
    model: torch.nn.Module,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    given: Sequence[Tensor | None] | None = None,
) -> Sequence[Tensor | None]:
    """Return the gradients of ``inputs``, None for those that the outputs do not depend on.

    ``given``: the gradients of the outputs. Where a backward is reentrant, inputs that are no leaves have None.
    """
    nodes = list(_nodes(outputs))
    if not any(REENTRANT in node.name() for node in nodes):
        return torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    reached = [node.variable for node in nodes if hasattr(node, "variable")]
    leaves = {id(t): t for t in (*reached, *model.parameters(), *inputs) if t.is_leaf}
    with _without_grads(list(leaves.values())):
        torch.autograd.backward(outputs, given)
        return [t.grad if t.is_leaf else None for t in inputs]


@contextmanager
def _without_grads(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take away ``.grad`` and the hooks behind its accumulation, such as an optimizer's step; put them back.

    The dict of hooks is emptied in place: the leaf's gradient accumulator keeps that dict whatever the attribute says.
    """
    grads = [leaf.grad for leaf in leaves]
    hooks = [leaf._post_accumulate_grad_hooks or {} for leaf in leaves]
    kept = [dict(one) for one in hooks]
    for leaf, one in zip(leaves, hooks, strict=True):
        leaf.grad = None
        one.clear()
    try:
        yield
    finally:
        for leaf, grad, one, before in zip(leaves, grads, hooks, kept, strict=True):
            leaf.grad = grad
            one.update(before)


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Any]:
    waiting: list[Any] = [t.grad_fn for t in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [one for one, _ in node.next_functions]
