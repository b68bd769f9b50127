"""Cast the operands of a concatenation while they are copied, instead of its result.

Before: ``stack([low, a, b], 1).bfloat16()``, which writes and reads an fp32 copy of everything. After:
``joined_low([low, a, b], 1, True, torch.bfloat16)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, IDENTITY, REGION, TRANSFORM
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.profitability.thresholds import casting_parts_is_profitable
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.double_backward import leaves_to_torch

own_functions(__name__)

JOINS = {"aten.cat": torch.ops.aten.cat.default, "aten.stack": torch.ops.aten.stack.default}


@dataclass(frozen=True)
class SinkCastsIntoConcat(Pass):
    """Replaces ``cat`` or ``stack`` and a cast, its only reader, with ``joined_low`` where it is profitable.

    Law: fp32 and low-precision operands, outside of regions whose precision the user set, with no write to them between
    concatenation and cast. Exactness: bit-exact, gradients included: each operand's gradient is cast to its dtype.
    """

    name: ClassVar[str] = "sink-casts-into-concat"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every cast to low precision."""
        changes, lifetimes = [], Lifetimes.of(gm)
        for cast in list(gm.graph.nodes):
            join = _join_before(cast)
            if join is None:
                continue
            given = arguments_of(join, JOINS[names_of(join)[0]])
            if given is None:
                continue
            parts, dim = list(given["tensors"]), given["dim"]
            if not _can_be_parts(join, parts) or any(lifetimes.is_written_between(p, join, cast) for p in parts):
                continue
            stacks = names_of(join) == ("aten.stack",)
            cast.op, cast.target, cast.kwargs = "call_function", joined_low, {}
            cast.args = (parts, dim % value(join).dim(), stacks, value(cast).dtype)
            for key in (IDENTITY, CAST):
                cast.meta.pop(key, None)
            gm.graph.erase_node(join)
            changes.append(Change(self.name, "cast in parts", cast.name, f"not {join.name} as a whole"))
        return PassResult(gm, tuple(changes))


def _join_before(cast: Node) -> Node | None:
    """Return the ``cat`` or ``stack`` whose only reader is ``cast``, to low precision; None if there is none."""
    if CAST not in cast.meta or cast.op != "call_method" or value(cast).dtype not in HALVES or cast.kwargs:
        return None
    (join,) = cast.all_input_nodes
    if len(join.users) != 1 or len(names_of(join)) != 1 or names_of(join)[0] not in JOINS:
        return None
    return join if {REGION, TRANSFORM, CHECKPOINT}.isdisjoint({*join.meta, *cast.meta}) else None


def _can_be_parts(join: Node, parts: list[Any]) -> bool:
    whole = value(join)
    dims = whole.dim() - (names_of(join) == ("aten.stack",))
    legal = all(isinstance(p, Node) and value(p).dtype in (torch.float32, *HALVES) for p in parts)
    if not legal or any(value(p).dim() != dims for p in parts) or is_channels_last(whole):
        return False
    return whole.dtype == torch.float32 and casting_parts_is_profitable(whole.device.type, whole.numel())


class _JoinedLow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, stacks: bool, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.kinds = dim, [(p.dtype, None if stacks else p.shape[dim]) for p in parts]
        return _join(parts, dim, stacks, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sizes = [size for _, size in ctx.kinds]
        pieces = grad.unbind(ctx.dim) if None in sizes else grad.split(sizes, ctx.dim)
        needed = ctx.needs_input_grad[3:]
        casts = zip(pieces, ctx.kinds, needed, strict=True)
        return None, None, None, *(piece.to(dtype) if wanted else None for piece, (dtype, _), wanted in casts)


def joined_low(parts: Sequence[Tensor], dim: int, stacks: bool, dtype: torch.dtype) -> Tensor:
    """Return ``torch.cat(parts, dim).to(dtype)``, or ``torch.stack`` if ``stacks``; ``dim`` is not negative."""
    if any(map(is_in_mode, parts)) or leaves_to_torch(*parts):
        return (torch.stack if stacks else torch.cat)([p.to(dtype) for p in parts], dim)
    if torch.is_grad_enabled() and any(p.requires_grad for p in parts):
        found: Tensor = _JoinedLow.apply(dim, stacks, dtype, *parts)
        return found
    return _join(parts, dim, stacks, dtype)


def _join(parts: Sequence[Tensor], dim: int, stacks: bool, dtype: torch.dtype) -> Tensor:
    shape = list(parts[0].shape)
    if stacks:
        shape.insert(dim, len(parts))
    else:
        shape[dim] = sum(p.shape[dim] for p in parts)
    whole = torch.empty(shape, dtype=dtype, device=parts[0].device)
    places = whole.unbind(dim) if stacks else whole.split([p.shape[dim] for p in parts], dim)
    for place, part in zip(places, parts, strict=True):
        place.copy_(part)
    return whole
