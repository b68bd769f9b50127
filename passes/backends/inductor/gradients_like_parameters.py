"""Hand the gradients of parameters out of compiled graphs with their parameters' strides.

Before: a convolution of channels_last images gives its weight gradient in that layout; the weight is contiguous, so
autograd copies the gradient outside of the compiled graph, one call for each weight.
After: the compiled backward returns the gradient in the weight's layout, and autograd takes it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.inductor import contiguous_weight_gradients as _defines_in_rows  # noqa: F401
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured
from amp_graph.passes.graph.meta_keys import CAST, REGION
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_wrapper
from amp_graph.passes.torch_compat.symbolic_sizes import is_number

own_functions(__name__)

LEAST_DIMENSIONS = 3  # gradients of matrices and vectors are computed in rows


@dataclass(frozen=True)
class GiveGradientsParameterStrides(Pass):
    """Replaces the reads of a parameter ``w`` with ``gradient_like(w, strides)``, whose backward copies to the strides.

    Law: parameters of 3 dimensions or more that the graph neither writes to nor returns, in graphs for Inductor whose
    gradients autograd accumulates. The copy is part of the compiled backward, in low precision where the parameter is
    only cast, and is left out where the gradient has these strides anyway. Exactness: bit-exact.
    """

    name: ClassVar[str] = "give-gradients-parameter-strides"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every parameter."""
        found = [n for n in gm.graph.find_nodes(op="placeholder") if _fits(n)]
        memory = observe(gm, marks(gm)) if found else None
        changes = []
        for source in found:
            assert memory is not None, "observed where a parameter fits"
            read = _cast_of(source) or source
            if not _may_be_read_by_another_name(source, read, memory):
                continue
            with gm.graph.inserting_after(read):
                made = gm.graph.call_function(gradient_like, (read, _target(captured(source))))
            for user in [u for u in read.users if u is not made]:
                user.replace_input_with(read, made)
            made.meta = {k: v for k, v in read.meta.items() if k != CAST}
            changes.append(Change(self.name, "given its strides", source.name, "its gradient is not copied again"))
        return PassResult(gm, tuple(changes))


def _fits(node: Node) -> bool:
    found = captured(node)
    if not isinstance(found, torch.nn.Parameter) or not found.requires_grad or is_wrapper(found):
        return False
    return found.dim() >= LEAST_DIMENSIONS and is_number(*found.shape, *found.stride()) and bool(node.users)


def _cast_of(source: Node) -> Node | None:
    """Return the cast that is the only reader of a parameter."""
    reader = next(iter(source.users))
    casts = reader.op == "call_method" and CAST in reader.meta and reader.args[:1] == (source,)
    return reader if casts and len(source.users) == 1 else None


def _may_be_read_by_another_name(source: Node, read: Node, memory: Memory) -> bool:
    """Say whether no write, and no reader outside, tells ``read`` from an alias of it."""
    seen = (source, read)
    if any(u.op == "output" or REGION in u.meta or u.target is gradient_like for n in seen for u in n.users):
        return False
    return not any(memory.is_written(n) for n in seen)


def _target(weight: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd wants for gradients of ``weight``: its own, or contiguous if it has gaps."""
    rows = _order(weight.stride())
    if weight.permute(rows).is_contiguous():
        return tuple(weight.stride())
    return torch.empty(weight.shape, device="meta").stride()


def _order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the outermost to the innermost."""
    return sorted(range(len(strides)), key=lambda i: -strides[i])


class _GradientLike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        ctx.strides = strides
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return laid(grad, ctx.strides), None


def gradient_like(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return ``x``, whose gradient will have ``strides``."""
    found: Tensor = _GradientLike.apply(x, strides)
    return found


def laid(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return ``grad`` with ``strides``, which are dense: itself if it has them, else a copy."""
    if all(size == 1 or have == want for size, have, want in zip(grad.shape, grad.stride(), strides, strict=True)):
        return grad
    rows = _order(strides)
    across = grad.permute(rows)
    # On the CPU, Inductor's transposing loops are slower than torch's copy.
    copy = OPS.in_rows(across) if grad.device.type == "cpu" else across.clone(memory_format=torch.contiguous_format)
    return copy.permute(sorted(range(len(rows)), key=rows.__getitem__))
