"""Operations that save, in place of an argument, the autograd node that can recompute it.

Before: ``conv2d(h, w)`` saves ``h``. After: ``computing_again(conv2d)(h, w)`` saves the autograd node that made ``h``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from amp_graph.passes.memory.recompute_functions import (
    CASTS,
    KEY,
    RecomputeRecipe,
    before_of,
    computed,
    may_hook,
    unless_written,
    value_of,
)
from amp_graph.passes.torch_compat.autograd import outer_saved_tensors_hooks

FEW = torch.iinfo(torch.int16).max


Root = tuple[Tensor, Any]  # a value that need not be saved, and the node that made it


def _holds(root: Root, t: Tensor) -> bool:
    """Say whether ``t`` is this value, or a view of it."""
    same = t.dtype == root[0].dtype and t.layout is torch.strided
    return same and t.untyped_storage()._cdata == root[0].untyped_storage()._cdata


def _root_of(given: Tensor) -> Root | None:
    """Return the recomputable value that ``given`` is, or is a view of; None if there is none."""
    node: Any = given.grad_fn
    if node is None:
        return None
    tensor = given
    if given._base is not None and KEY not in node.metadata and node.name() not in CASTS:
        tensor, node = given._base, given._base.grad_fn
    if node is None:
        return None
    if node.name() in CASTS and KEY not in node.metadata:
        _mark_cast(node, tensor)
    return (tensor, node) if KEY in node.metadata else None


def _mark_cast(node: Any, made: Tensor) -> None:
    """Make the result of a cast recomputable if its source is."""
    before = before_of(node)
    if before is None or KEY not in before.metadata or made.dtype.itemsize > 2:
        return
    node.metadata[KEY] = RecomputeRecipe(made.dtype)
    before.metadata[KEY].readers += 1


def _pack(roots: list[Root], outer: Any) -> Callable[[Tensor], Any]:
    def pack(t: Tensor) -> Any:
        root = next((r for r in roots if _holds(r, t)), None)
        if root is None:
            return _as_ever(t, roots[0][0], outer)
        (whole, node), given = root, (tuple(t.shape), t.stride(), t.storage_offset())
        start = whole.storage_offset()
        part = None if given == (tuple(whole.shape), whole.stride(), start) else (*given[:2], given[2] - start)
        node.metadata[KEY].readers += 1
        return partial(_computed, node, (tuple(whole.shape), whole.stride()), part)

    return pack


def _computed(node: Any, whole: tuple[Any, Any], part: tuple[Any, Any, Any] | None) -> Tensor:
    """Return the value that ``node`` made, in the layout ``whole``, or a part that was viewed of it."""
    value = value_of(node)
    shape, stride = whole
    if value.stride() != stride:
        value = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).copy_(value)
    return value if part is None else value.as_strided(*part)


def _as_ever(t: Tensor, read: Tensor, outer: Any) -> Any:
    """Save ``t`` itself as autograd would; indices that a pool chose in ``read`` in the smallest integer type."""
    if t.dtype == torch.int64 and read.dim() >= 3:
        few = read.shape[-2] * read.shape[-1] <= FEW
        unpack, kept = _itself(t.to(torch.int16 if few else torch.int32), outer)
        return (lambda packed: unpack(packed).long()), kept
    return _itself(t, outer)


def _itself(t: Tensor, outer: Any) -> tuple[Callable[[Any], Tensor], Any]:
    return (unless_written, (t, t._version)) if outer is None else (outer[1], outer[0](t))


def _unpack(packed: Any) -> Tensor:
    if callable(packed):
        return computed(packed)
    unpack, kept = packed
    found: Tensor = unpack(kept)
    return found


_READERS: dict[Any, Callable[..., Any]] = {}
_ORIGINALS: dict[Any, Callable[..., Any]] = {}


def original(target: Any) -> Any:
    """Return the function that ``computing_again`` wrapped as ``target``; ``target`` itself if it did not."""
    return _ORIGINALS.get(target, target) if callable(target) else target


def computing_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``function`` that saves none of its recomputable arguments; the same object at every call."""
    if function in _READERS:
        return _READERS[function]
    if function in _ORIGINALS:  # already wrapped for another argument
        return function

    def reader(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)] if may_hook() else []
        roots = [root for t in tensors if (root := _root_of(t)) is not None]
        if not roots:
            return function(*args, **kwargs)
        with saved_tensors_hooks(_pack(roots, outer_saved_tensors_hooks()), _unpack):
            return function(*args, **kwargs)

    reader.__name__ = reader.__qualname__ = f"{getattr(function, '__name__', 'reader')}_computing_again"
    _READERS[function], _ORIGINALS[reader] = reader, function
    return reader
