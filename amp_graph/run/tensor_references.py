"""Tensors known by identity, without a strong reference to them.

``add(known, [weight])``, then ``is_in(known, weight)``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

References = dict[int, "weakref.ref[Tensor]"]


def add(known: References, tensors: Iterable[Tensor]) -> None:
    """Add ``tensors``."""
    known.update((id(t), weakref.ref(t)) for t in tensors)


def is_in(known: References, tensor: Tensor) -> bool:
    """Return whether ``tensor`` is there, and is still the tensor that was added."""
    ref = known.get(id(tensor))
    return ref is not None and ref() is tensor
