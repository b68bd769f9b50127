"""A residual sum with the following norm, whose low-precision norm is recomputed in backward.

Before: ``s, a = add_norm(x, branch, ...); y = linear(a, w)``, which saves ``s`` and ``a``.
After: ``s, a = add_norm_computed_again(x, branch, ...); y = computing_again(linear)(a, w)``, which saves only ``s``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from amp_graph.passes.backends.cpu.norm.add_norm_functions import LOWS, add_norm, normed_again
from amp_graph.passes.memory.recomputable_ops import marked
from amp_graph.passes.memory.recompute_functions import KEY, register_recompute
from amp_graph.passes.registry import Recomputable, declare

ADD_NORM = "_AddNormBackward"  # the node of autograd


def add_norm_computed_again(x: Tensor, branch: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """``add_norm`` whose low-precision norm can be recomputed; the sum is saved."""
    made = add_norm(x, branch, *given)
    node: Any = made[-1].grad_fn
    if node is not None and node.name() == ADD_NORM:  # else torch's own, in a transform
        _, weight, bias = given[:3]
        marked(made[-1], (x if branch is None else made[0], weight, bias), first=LOWS)
    return made


def _normed(node: Any) -> Tensor:
    inputs = node.metadata[KEY].inputs
    total, weight, bias = inputs() if inputs else (node.saved_tensors[i] for i in (0, 2, 3))
    return normed_again(total, weight, bias, node.form)


def _saves(call: Node, source: Node) -> bool:
    return call.args[1] is None  # else it saves the sum


def _lows(call: Node) -> tuple[Node, ...]:
    """Return the low-precision results of a call: those after the sum, and the norm in fp32."""
    parts: list[Any] = list(call.users)
    full, keep = map(bool, call.args[8:10])
    return tuple(part for part in parts if part.args[1] >= full + keep)


register_recompute(ADD_NORM, _normed)
declare(
    add_norm,
    saves=_saves,
    recomputable=Recomputable("layer norm", replacement=add_norm_computed_again, aliases=_lows),
)
declare(add_norm_computed_again, saves=_saves, recomputable=Recomputable())
