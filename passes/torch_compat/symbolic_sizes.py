"""Compare sizes and strides that may be symbolic: true only if known for every value of the symbols.

Before: ``a.shape == b.shape``, which specializes the user's dynamic sizes to the present ones, and raises if a size
depends on data.
After: ``same(a.shape, b.shape)``, which adds no guard and is False if unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from amp_graph.passes.torch_compat.fake import SYMBOLIC, FakeTensor, free_unbacked_symbols, statically_known_true


def same(one: Any, other: Any) -> bool:
    """Say whether two numbers, or two shapes, are known to be equal for all values of their symbols."""
    if isinstance(one, (tuple, list)) or isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is int and type(other) is int:
        return bool(one == other)
    return statically_known_true(one == other)


def is_number(*sizes: Any) -> bool:
    """Say whether all ``sizes`` are numbers, not symbols."""
    return all(type(size) is int for size in sizes)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are known to have the same shape, dtype and strides."""
    return one.dtype == other.dtype and same(one.shape, other.shape) and same(one.stride(), other.stride())


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is known to be contiguous."""
    if is_number(*tensor.shape, *tensor.stride()):
        return tensor.is_contiguous()
    step: Any = 1
    filled: Any = 1  # torch counts a size of 0 as 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1):
            if not same(stride, step) and not same(stride, filled):
                return False
            step, filled = step * size, filled * torch.sym_max(1, size)
    return True


def depends_on_data(val: Any) -> bool:
    """Say whether a size in a node's value, or its number, is known only after the operation has run."""
    return any(bool(free_unbacked_symbols(number)) for number in _symbols(val))


def _symbols(val: Any) -> Iterator[Any]:
    if isinstance(val, torch.Tensor):
        yield from (n for n in val.shape if not is_number(n))
        if val.layout is torch.strided:
            yield from (n for n in val.stride() if not is_number(n))
    elif isinstance(val, SYMBOLIC):
        yield val
    elif isinstance(val, (tuple, list)):
        for part in val:
            yield from _symbols(part)


def with_sizes_of(fresh: Any, known: Any) -> Any:
    """Return ``fresh``, a recomputed node value, with the data-dependent sizes of the ``known`` one.

    A recomputed value gets new symbols for such sizes, which nothing else in the graph has.
    """
    if isinstance(fresh, (tuple, list)) and isinstance(known, (tuple, list)) and len(fresh) == len(known):
        parts = [with_sizes_of(a, b) for a, b in zip(fresh, known, strict=True)]
        return type(fresh)(*parts) if hasattr(fresh, "_fields") else type(fresh)(parts)
    if isinstance(fresh, SYMBOLIC):
        return known if type(known) is type(fresh) else fresh
    if not isinstance(fresh, FakeTensor) or not isinstance(known, FakeTensor) or not _is_renamed(fresh, known):
        return fresh
    with fresh.fake_mode:
        return torch.empty_strided(known.shape, known.stride(), dtype=fresh.dtype, device=fresh.device)


def _is_renamed(fresh: torch.Tensor, known: torch.Tensor) -> bool:
    if fresh.dim() != known.dim() or fresh.layout is not torch.strided or known.layout is not torch.strided:
        return False
    return _unbacked(fresh) != _unbacked(known)


def _unbacked(tensor: torch.Tensor) -> set[Any]:
    return {symbol for number in _symbols(tensor) for symbol in free_unbacked_symbols(number)}
