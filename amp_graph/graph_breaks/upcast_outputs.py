"""Upcasts the outputs of a call whose uncaptured code ran under autocast.

Before: ``{"logits": bf16}`` of a model that ran as partial graphs. After: ``{"logits": f32}``, as without amp_graph.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.passes.graph.view_overlap import may_overlap
from amp_graph.passes.torch_compat.storage import storage_key, storage_of


def widened_outputs(result: Any, dtype: torch.dtype, own: Callable[[], set[int]]) -> Any:
    """Return ``result`` with its tensors of ``dtype`` in fp32; those with an id in ``own()`` stay as they are.

    Descends into pytrees and dataclasses; other objects are returned unchanged. Views of one tensor stay views of one
    tensor.
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
        made.clear()  # the recursive function would keep them until a garbage collection


def _is_low(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == dtype


def _views_of_one(low: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return upcast copies, by id, of tensors that overlap, as views of one tensor."""
    memories: dict[int | None, dict[int, torch.Tensor]] = {}
    for t in low:
        if type(t) is torch.Tensor and t.layout is torch.strided and t.numel():
            memories.setdefault(storage_key(t), {})[id(t)] = t
    found: dict[int, torch.Tensor] = {}
    for key, sharing in memories.items():
        views = list(sharing.values())
        if key is not None and any(may_overlap(a, b) for i, a in enumerate(views) for b in views[:i]):
            _add_views(found, views)
    return found


def _add_views(found: dict[int, torch.Tensor], sharing: list[torch.Tensor]) -> None:
    """Add the tensors of one storage; those with gradients must be views of one tensor."""
    trained = [t for t in sharing if t.requires_grad]
    bases = {id(base): base for base in (t if t._base is None else t._base for t in trained)}
    base = next(iter(bases.values()), None)
    if base is None:
        start, end = min(t.storage_offset() for t in sharing), max(map(_end, sharing))
        base = torch.empty(0, dtype=sharing[0].dtype, device=sharing[0].device)
        base.set_(storage_of(sharing[0]), start, (end - start,), (1,))
    elif len(bases) > 1 or not all(_lies_in(t, base) for t in sharing):
        return
    wide = base.float()
    if wide.stride() != base.stride():
        return
    for t in sharing:
        source = wide if t.requires_grad else wide.detach()
        found[id(t)] = source.as_strided(t.shape, t.stride(), t.storage_offset() - base.storage_offset())
    if id(base) in found:
        found[id(base)] = wide


def _end(t: torch.Tensor) -> int:
    """Return the storage offset after the last element of ``t``, which is not empty."""
    return int(t.storage_offset() + sum((n - 1) * d for n, d in zip(t.shape, t.stride(), strict=True)) + 1)


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether ``part``, of the same storage, is inside ``whole``, which has no gaps."""
    dense = _end(whole) - whole.storage_offset() == whole.numel()
    return dense and whole.storage_offset() <= part.storage_offset() and _end(part) <= _end(whole)


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
    """Return a copy of a dataclass with ``change`` applied to its fields, without running its ``__post_init__``."""
    copied = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            object.__setattr__(copied, field.name, change(getattr(leaf, field.name)))
    return copied
