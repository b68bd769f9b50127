"""A key of everything that decides which ATen operations a node calls; nodes with one key share one identity.

Before: the linears of twelve layers. After: one key, ``(call_function, F.linear, ("tensor", float32, 3, "cpu"), ...)``.
``x.cumsum(0)`` and ``x.cumsum(1)`` share ``cumsum(dim=OWN_NUMBER)``, which raises if it is compared or computed with;
``identify_ops.operation_of(node, mode)`` has the numbers of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten

from amp_graph.passes.graph.fake_values import argument_values
from amp_graph.passes.torch_compat.fake import concrete_size, is_number

TELL_NUMBERS = ("pow", "dropout", "attention")  # in the names of functions
LAYS_OUT = frozenset({"contiguous", "ravel"})
LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def node_key(node: Node) -> Any:
    """Return a key of a node's operations: the target and its arguments, tensors by dtype and rank.

    Integers count by type only, except where ``tells_numbers``: sizes and dims do not decide which operation a call
    becomes, and would give each layer its own key.
    """
    args, kwargs = argument_values(node)
    flat, spec = tree_flatten((args, kwargs))
    try:
        first = {id(leaf): i for i, leaf in reversed(list(enumerate(flat))) if isinstance(leaf, torch.Tensor)}
        same = tuple(first.get(id(leaf)) for leaf in flat)
        leaves = tuple(_leaf_key(leaf) for leaf in flat)
        told = (_whole_slices(args), _numbers(node, flat), _operand_layouts(node, flat))
        key = (node.op, node.target, str(spec), leaves, same, *told)
        hash(key)
    except TypeError:
        return None
    return key


def tells_numbers(node: Node) -> bool:
    """Say whether the integers of a call decide its operations: exponents, and probabilities of 0."""
    name = getattr(node.target, "__name__", str(node.target))
    return any(part in name for part in TELL_NUMBERS)


def _numbers(node: Node, flat: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaf for leaf in flat if type(leaf) is int) if tells_numbers(node) else ()


def _operand_layouts(node: Node, flat: Sequence[Any]) -> tuple[tuple[bool, ...], ...]:
    """Return the operands' layouts for calls that are no-ops if the operand has the requested layout already."""
    if getattr(node.target, "__name__", str(node.target)) not in LAYS_OUT:
        return ()
    return tuple(_layouts(leaf) for leaf in flat if isinstance(leaf, torch.Tensor))


def _layouts(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Say for each layout whether ``tensor`` has it; adds no guard on symbolic sizes."""
    sizes, strides = (tuple(map(concrete_size, numbers)) for numbers in (tensor.shape, tensor.stride()))
    alike = torch.empty_strided(sizes, strides, device="meta")
    return tuple(alike.is_contiguous(memory_format=layout) for layout in LAYOUTS)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return ("tensor", leaf.dtype, leaf.dim(), leaf.device.type)
    if isinstance(leaf, (bool, torch.SymBool)):
        return ("bool", leaf if isinstance(leaf, bool) else None)
    if isinstance(leaf, (int, torch.SymInt)):
        return ("int",)
    if isinstance(leaf, torch.SymFloat):
        return ("float",)
    if isinstance(leaf, slice):
        return ("slice", leaf.start is None, leaf.stop is None, leaf.step is None)
    return (type(leaf), leaf)


def _whole_slices(args: Sequence[Any]) -> tuple[bool | None, ...]:
    """Say which slices of ``x[index]`` take their whole dimension: torch skips those."""
    if len(args) != 2 or not isinstance(args[0], torch.Tensor):
        return ()
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return ()
    sizes = args[0].shape
    hidden = len(sizes) - sum(type(i) in (int, slice) for i in index)
    found: list[bool | None] = []
    dim = 0
    for i in index:
        if isinstance(i, slice) and dim < len(sizes):
            found.append(_is_whole(i, sizes[dim]))
        dim += hidden if i is Ellipsis else i is not None
    return tuple(found)


def _is_whole(part: slice, size: Any) -> bool | None:
    numbers = [n for n in (size, part.start, part.stop, part.step) if n is not None]
    return part.indices(size) == (0, size, 1) if is_number(*numbers) else None


# -- what nodes of one key do not share -------------------------------------------------------------


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
