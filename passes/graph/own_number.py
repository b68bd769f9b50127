"""A placeholder in a shared identity for an integer that differs from node to node.

Before: ``x.cumsum(0)`` and ``x.cumsum(1)`` share the identity ``cumsum(dim=0)``. After: they share
``cumsum(dim=OWN_NUMBER)``, which raises if it is compared or computed with; ``operation_of(node, mode)`` has the
numbers of one node.
"""

from __future__ import annotations

from typing import Any

import torch


class _OwnNumber:
    """A placeholder that raises TypeError if it is used as a number."""

    def __repr__(self) -> str:
        return "OWN_NUMBER"

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "this integer is another node's: an identity is shared by calls that differ in their integers\n"
            "  fix:   operation_of(node, mode).arguments, or the node's own args"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __abs__ = _refuse
    __hash__ = object.__hash__


OWN_NUMBER = _OwnNumber()


def without_numbers(leaf: Any) -> Any:
    """Return an argument with each integer replaced by ``OWN_NUMBER``; booleans and enumerations stay."""
    if isinstance(leaf, (list, tuple)):
        return (
            tuple(map(without_numbers, leaf)) if isinstance(leaf, tuple) else [without_numbers(part) for part in leaf]
        )
    return OWN_NUMBER if type(leaf) is int or isinstance(leaf, torch.SymInt) else leaf
