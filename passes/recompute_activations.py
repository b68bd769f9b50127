"""Let a linear compute its input again in backward, where that is an activation of a value that is kept anyway.

Before: ``h = gelu(a); y = linear(h, w, b)``, which keeps ``a`` and ``h``. After:
``y = linear_of_activation(h, w, b, a, "gelu")``, which keeps ``a`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.checkpoints import CHECKPOINT
from amp_graph.passes.identify_ops import names_of
from amp_graph.passes.memory import observe
from amp_graph.passes.node_value import captured, value
from amp_graph.passes.plan_precision import marks
from amp_graph.passes.regions import GRAD, REGION
from amp_graph.passes.runtime import linear_of_activation
from amp_graph.passes.torch_private import concrete_size

VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view")


@dataclass(frozen=True)
class RecomputeActivations(Pass):
    """Replaces a linear that alone reads a GELU or SiLU by one that does not save it.

    Only in training, outside of checkpoints and of the user's own autocast, and where nobody writes to either
    value. Exactness: bit-exact, backward runs the same kernel on the same bits. Cost: that kernel once more, which
    is to the linear as one is to its width: below ``narrowest`` outputs it is not worth the memory.
    """

    narrowest: int = 256
    name: ClassVar[str] = "recompute-activations"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every linear."""
        memory = observe(gm, marks(gm))
        changes = []
        for node in gm.graph.nodes:
            operands = _operands(node)
            found = _activation(operands[0]) if operands else None
            if operands is None or found is None or memory.is_written(found[0]) or memory.is_written(operands[0]):
                continue
            before, activation = found
            if concrete_size(_width(node)) < self.narrowest:
                continue
            if not captured(node).requires_grad or not node.meta.get(GRAD, True):
                continue
            if CHECKPOINT in node.meta or REGION in node.meta:  # these have a say in what is saved, or computed
                continue
            names = names_of(node)
            node.op, node.target, node.kwargs = "call_function", linear_of_activation, {}
            node.args = (*operands, before, activation, names == ("aten.addmm",))
            changes.append(Change(self.name, "recomputes", node.name, f"{activation} of {before.name} is not saved"))
        return PassResult(gm, tuple(changes))


def _operands(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Return input, weight and bias of a linear that one call makes, or None."""
    if node.op != "call_function" or node.target is linear_of_activation:
        return None
    names = names_of(node)
    args = [*node.args, *node.kwargs.values()]
    if names == ("aten.addmm",) and len(args) == 3 and not set(node.kwargs) - {"mat1", "mat2", "input"}:
        bias, x, weight = args
    elif names == ("aten.linear",) and not set(node.kwargs) - {"bias"}:
        x, weight, bias = (*args, None)[:3]
    else:
        return None
    if not isinstance(x, Node) or not isinstance(weight, Node) or not (bias is None or isinstance(bias, Node)):
        return None
    whole = (
        value(weight).dim() == 2 and value(weight).dtype == value(x).dtype and (bias is None or value(bias).dim() == 1)
    )
    return (x, weight, bias) if whole else None


def _activation(node: Node) -> tuple[Node, str] | None:
    """Return what ``node`` is the activation of, by way of views, and the activation's name."""
    while len(node.users) == 1 and names_of(node) in [(name,) for name in VIEWS]:
        if not isinstance(node.args[0], Node) or _width(node) != _width(node.args[0]):
            return None
        node = node.args[0]
    if len(node.users) != 1 or node.op != "call_function" or not isinstance(node.args[0], Node):
        return None
    if not isinstance(captured(node.args[0]), torch.Tensor) or not captured(node.args[0]).requires_grad:
        return None
    if names_of(node) == ("aten.gelu",):
        return node.args[0], "gelu_tanh" if "tanh" in (*node.args[1:], *node.kwargs.values()) else "gelu"
    return (node.args[0], "silu") if names_of(node) == ("aten.silu",) else None


def _width(node: Node) -> object:
    return value(node).shape[-1]
