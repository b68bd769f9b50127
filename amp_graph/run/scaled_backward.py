"""One backward from scaled gradients: what it reaches, what in it would see the scale, and unscaling on arrival.

Before: ``loss.backward()``. After: ``with unscaled(leaves, 1 / scale, checks): (loss * scale).backward()`` accumulates
the same gradients, and ``all_finite(checks)`` says whether none overflowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from amp_graph.passes.graph.graph_text import grouped
from amp_graph.passes.torch_compat.autograd import nodes_behind
from amp_graph.passes.torch_compat.dispatch import is_wrapper
from amp_graph.run import eligibility as why

OURS = "amp_graph."
DDP = "torch.nn.parallel.distributed"  # its function hands gradients on as they are
COMPILED = (
    "torch._functorch."  # by --compile; before a model is converted, such a node is of code that the script compiled
)


def leaves_and_functions(roots: Sequence[Any]) -> tuple[list[Tensor], set[type]]:
    """Return the leaves that a backward from ``roots`` adds gradients to, and the custom functions on the way."""
    leaves: dict[int, Tensor] = {}
    functions = set[type]()
    starts = (get_gradient_edge(root).node for root in roots if isinstance(root, Tensor) and root.requires_grad)
    for node in nodes_behind(starts):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves[id(leaf)] = leaf
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            functions.add(getattr(type(node), "_forward_cls", type(node)))
    return [*leaves.values()], functions


def why_not_scaled(
    given: tuple[Sequence[Any], Sequence[Any]],
    how: Mapping[str, Any],
    leaves: Sequence[Tensor],
    functions: Iterable[type],
    *,
    converted: bool,
) -> str:
    """Return what keeps a backward from being scaled, from ``given``, roots and their gradients; "" if nothing does.

    converted: whether a model of the script is converted.
    """
    known = (OURS, DDP, COMPILED) if converted else (OURS, DDP)
    custom = next((one.__name__ for one in functions if not one.__module__.startswith(known)), "")
    reasons = {
        f"{why.FUNCTION}, {custom}": bool(custom),
        "backward(create_graph=True)": how.get("create_graph"),
        "backward(inputs=...)": how.get("inputs") is not None or how.get("grad_variables") is not None,
        why.HOOKS: any(map(_is_hooked, leaves)),
        "a trained tensor that is distributed, wrapped or not fp32": not all(map(_is_plain, leaves)),
        "a loss that is no plain tensor in fp32": any(
            type(one) is not Tensor or one.dtype != torch.float32 for one in given[0]
        ),
        "a backward from what is no plain tensor": any(type(one) not in (Tensor, type(None)) for one in given[1]),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_hooked(leaf: Tensor) -> bool:
    """Return whether ``leaf`` has a hook other than the one that says that a backward reached it."""
    hooks = (leaf._backward_hooks or {}).values()
    return bool(leaf._post_accumulate_grad_hooks) or any(
        not str(getattr(hook, "__module__", "")).startswith(OURS) for hook in hooks
    )


def _is_plain(leaf: Tensor) -> bool:
    return leaf.dtype == torch.float32 and not is_wrapper(leaf)


def can_begin(roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> bool:
    """Return whether torch can start a backward there; else it raises the error that says why not."""
    return len(roots) == len(seeds) and all(
        root.numel() == 1 if seed is None else seed.shape == root.shape for root, seed in zip(roots, seeds, strict=True)
    )


@contextlib.contextmanager
def unscaled(leaves: Sequence[Tensor], inverse: float, checks: list[Tensor]) -> Iterator[None]:
    """Multiply gradients that arrive at ``leaves`` by ``inverse``; ``checks`` gets a 0 for each, or NaN: it overflowed.

    That gradient then is NaN throughout, which each sum and clipping hands on, where an infinity could be clipped.
    """

    def arrive(grad: Tensor) -> Tensor:
        checks.append(_zero_or_nan(grad))
        return grad * (checks[-1] + inverse)

    hooks = [leaf.register_hook(arrive) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zero_or_nan(values: Tensor) -> Tensor:
    """Return 0, or NaN if one of ``values`` is not finite, in two kernels."""
    return (values - values).sum()


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of ``tensors`` are finite; waits for each device once."""
    checks = grouped((one.device, _zero_or_nan(one)) for one in tensors)
    return all(bool(torch.stack(found).isfinite().all()) for found in checks.values())
