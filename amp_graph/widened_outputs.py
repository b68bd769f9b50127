"""What a call returns in low precision, in fp32: where code that escaped capture ran under autocast.

Before: ``{"logits": bf16}`` of a model that was called in pieces. After: ``{"logits": f32}``, as without amp_graph.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.passes.torch_private import storage_key


def widened_outputs(result: Any, dtype: torch.dtype, own: Callable[[], set[int]]) -> Any:
    """Return ``result`` with its tensors of ``dtype`` in fp32; those with an id in ``own()`` stay as they are.

    Looks into what pytree knows and into dataclasses; other objects are returned as they are. Of tensors that lie in
    the memory of another, the results do so too.
    """
    if not any(_is_low(leaf, dtype) for leaf in _leaves(result)):
        return result
    kept = own()
    made = _views_of_one([t for t in _leaves(result) if _is_low(t, dtype) and id(t) not in kept])

    def widen(leaf: Any) -> Any:
        if _is_plain_dataclass(leaf):
            return _replaced(leaf, lambda part: tree_map(widen, part))
        if not _is_low(leaf, dtype) or id(leaf) in kept:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.float()
        return made[id(leaf)]

    try:
        return tree_map(widen, result)
    finally:
        made.clear()  # the function that refers to itself would keep them until a garbage collection


def _is_low(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == dtype


def _views_of_one(low: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return in fp32, by id, those tensors of which one lies in the memory of another, as views of that one."""
    memories: dict[int | None, dict[int, torch.Tensor]] = {}
    for t in low:
        if type(t) is torch.Tensor and t.layout is torch.strided:
            memories.setdefault(storage_key(t), {})[id(t)] = t
    found: dict[int, torch.Tensor] = {}
    for key, sharing in memories.items():
        if key is not None and len(sharing) > 1:
            _add_views(found, list(sharing.values()))
    return found


def _add_views(found: dict[int, torch.Tensor], sharing: list[torch.Tensor]) -> None:
    """Add those of the tensors of one storage of which one lies in another."""
    for whole in sorted(sharing, key=torch.Tensor.numel, reverse=True):
        inside = [t for t in sharing if t is not whole and id(t) not in found and _lies_in(t, whole)]
        if id(whole) in found or not inside:
            continue
        wide = found[id(whole)] = whole.float()
        for t in inside if wide.stride() == whole.stride() else ():
            source = wide if t.requires_grad else wide.detach()
            found[id(t)] = source.as_strided(t.shape, t.stride(), t.storage_offset() - whole.storage_offset())


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Say whether ``part``, of the same storage, lies in ``whole``, which has no gaps, and has its gradients by it."""
    if not part.numel():
        return False
    span = sum((n - 1) * d for n, d in zip(whole.shape, whole.stride(), strict=True)) + 1
    if span != whole.numel():
        return False
    start = part.storage_offset() - whole.storage_offset()
    end = start + sum((n - 1) * d for n, d in zip(part.shape, part.stride(), strict=True)) + 1
    base = whole if whole._base is None else whole._base
    return 0 <= start and end <= whole.numel() and (not part.requires_grad or part._base is base)


def _leaves(result: Any) -> Iterator[Any]:
    for leaf in tree_leaves(result):
        if _is_plain_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        else:
            yield leaf


def _is_plain_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _replaced(leaf: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with ``change`` done to its fields; its own checks are not run again."""
    copied = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            object.__setattr__(copied, field.name, change(getattr(leaf, field.name)))
    return copied
