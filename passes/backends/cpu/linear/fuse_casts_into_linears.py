"""Let small linears in training read their parameters directly, and return gradients in the parameters' dtype.

Before: ``linear_low(x, weight_copy(w), weight_copy(b))``, for which autograd casts two gradients, with calls that take
longer than the casts.
After: ``linear_of_parameters(x, w, b)``, whose backward writes fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear.linear_functions import (
    gradients_of_low,
    linear_low,
    multiplied,
    shaped_as,
)
from amp_graph.passes.backends.cpu.linear.lower_linears import bias_of
from amp_graph.passes.backends.cpu.linear.panel_gemm import as_rows
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST, CASTS_INSIDE
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.double_backward import is_plain, leaves_to_torch
from amp_graph.passes.weights.cache_entry import LARGE
from amp_graph.passes.weights.cache_weight_casts import casts_of_parameters
from amp_graph.passes.weights.cast_cache import WeightCopies, WeightCopy

own_functions(__name__)
Reads = tuple[WeightCopy, WeightCopy]  # of a weight, and of its bias


class _OfParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reads: Reads, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = reads[0](weight, bare=True)
        _, of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, low if of_x else None)
        ctx.weight = weight  # only for second derivatives
        found = multiplied(as_rows(x), low.t(), None if bias is None else reads[1](bias, bare=True))
        return shaped_as(found, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, low = ctx.saved_tensors
        if low is not None and is_plain(grad):
            low = ctx.weight.to(low.dtype)
        return None, *gradients_of_low(grad, x, low, ctx.needs_input_grad[1:], True)


def cast_at_each_call(weight: Tensor, bare: bool = True) -> Tensor:
    """Return ``weight`` in bf16, without gradients: inside of a Function nothing is recorded."""
    assert bare, "only for what leads gradients back itself"
    return weight.to(torch.bfloat16)


def linear_of(read: WeightCopy, read_bias: WeightCopy | None = None) -> Callable[..., Tensor]:
    """Return ``linear_low`` for fp32 parameters, of which ``read`` returns copies, ``read_bias`` those of biases."""
    reads = (read, read_bias or read)

    def linear_of_parameters(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if leaves_to_torch(x, weight, bias):
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        found: Tensor = _OfParameters.apply(reads, x, weight, bias)
        return found

    return linear_of_parameters


@dataclass(frozen=True)
class FuseCastsIntoLinears(Pass):
    """Replaces ``linear_low`` of small weights' copies that nothing else reads with one that makes them itself.

    Law: gradients are rounded to low precision and upcast, as by casts. Exactness: bit-exact.
    """

    copies: WeightCopies
    name: ClassVar[str] = "fuse-casts-into-linears"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every small linear."""
        changes = []
        plain = {cast for cast, reason in casts_of_parameters(gm, torch.bfloat16) if not reason}
        made: dict[Reads, Callable[..., Tensor]] = {}
        for node in list(gm.graph.nodes):
            casts = (node.args[1], bias_of(node)) if node.target is linear_low else ()
            if not casts or not all(self._is_read_alone(cast, plain) for cast in casts if cast is not None):
                continue
            reads = (self._read_by(casts[0]), self._read_by(casts[1]))
            node.target = made.setdefault(reads, linear_of(*reads))
            node.args, node.kwargs = (node.args[0], *(c and c.args[0] for c in casts)), {}
            node.meta[CASTS_INSIDE] = {c.args[0]: c.meta[CAST] for c in casts if c is not None}
            for cast in casts:
                if cast is not None:
                    gm.graph.erase_node(cast)
            changes.append(Change(self.name, "casts inside", node.name, "autograd's calls take longer than the casts"))
        return PassResult(gm, tuple(changes))

    def _read_by(self, cast: Node | None) -> WeightCopy:
        return self.copies.read if cast is not None and cast.target is self.copies.read else cast_at_each_call

    def _is_read_alone(self, cast: Any, plain: set[Node]) -> bool:
        """Say whether ``cast`` is a copy, read by one linear only, of a parameter whose gradient is small."""
        kept = isinstance(cast, Node) and cast.target is self.copies.read and cast.kwargs == {"once": True}
        fits = kept or (cast in plain and len(cast.args) == 1 and not cast.kwargs)
        return fits and len(cast.users) == 1 and value(cast).numel() < LARGE
