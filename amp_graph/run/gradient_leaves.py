"""Finds the leaves that a backward reaches, and what in it would see that its gradients are scaled.

``leaves_of([loss])`` is ([weight, bias], ""), or says what stands in the way: "a custom autograd function, Clip, ...".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_graph.run import eligibility as why

OURS = "amp_graph."
DDP = "torch.nn.parallel.distributed"  # its function hands gradients on as they are
COMPILED = (
    "torch._functorch."  # by --compile; before a model is converted, such a node is of code that the script compiled
)


def leaves_of(roots: Sequence[Any], *, converted: bool) -> tuple[list[Tensor], str]:
    """Return the leaves that a backward from ``roots`` adds gradients to, and why these cannot be scaled, or ""."""
    leaves: list[Tensor] = []
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
    leaves += [root for root in roots if isinstance(root, Tensor) and root.grad_fn is None and root.requires_grad]
    seen, reason = set(waiting), ""
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            reason = reason or _of_function(node, converted)
        for one, _ in node.next_functions:
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return leaves, reason or _of_leaves(leaves)


def why_not_scaled(roots: Sequence[Any], seeds: Sequence[Any], how: Mapping[str, Any]) -> str:
    """Return what in the arguments of a backward keeps it from being scaled; ""  if nothing does."""
    if how.get("create_graph"):
        return "backward(create_graph=True)"
    if how.get("inputs") is not None or how.get("grad_variables") is not None:
        return "backward(inputs=...)"
    if any(type(root) is not Tensor or root.dtype != torch.float32 for root in roots):
        return "a loss that is no plain tensor in fp32"
    if any(seed is not None and type(seed) is not Tensor for seed in seeds):
        return "a backward from what is no plain tensor"
    return ""


def can_begin(roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> bool:
    """Return whether torch can start a backward there; else it raises the error that says why not."""
    if len(roots) != len(seeds):
        return False
    pairs = zip(roots, seeds, strict=True)
    return all(root.numel() == 1 if seed is None else seed.shape == root.shape for root, seed in pairs)


def _of_function(node: Any, converted: bool) -> str:
    function = getattr(type(node), "_forward_cls", type(node))
    if function.__module__.startswith((OURS, DDP)) or (converted and function.__module__.startswith(COMPILED)):
        return ""
    return f"{why.FUNCTION}, {function.__name__}"


def _of_leaves(leaves: Sequence[Tensor]) -> str:
    if any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves if not _is_watched(leaf)):
        return why.HOOKS
    if any(leaf.dtype != torch.float32 for leaf in leaves):
        return "a trained tensor that is not fp32"
    if len({leaf.device for leaf in leaves}) > 1:
        return "trained tensors on several devices"
    return ""


def _is_watched(leaf: Tensor) -> bool:
    """Return whether all its hooks are those by which ``trained_models`` learns that a backward reached it."""
    hooks = (leaf._backward_hooks or {}).values()
    return not leaf._post_accumulate_grad_hooks and all(getattr(h, "__module__", "").startswith(OURS) for h in hooks)
