"""A batch norm with the following relu whose result is recomputed in backward if nothing saves it.

Before: ``conv2d(norm_and_relu(x, ...), w)``, which saves the relu's result.
After: ``computing_again(conv2d)(norm_and_relu_computed_again(x, ...), w)``, which saves only ``x``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from amp_graph.passes.backends.cpu.norm.batch_norm_functions import (
    norm_add_relu,
    norm_alone,
    norm_and_relu,
    normed_again,
)
from amp_graph.passes.memory.recomputable_ops import marked
from amp_graph.passes.memory.recompute_functions import (
    KEY,
    computed,
    is_known,
    may_hook,
    register_recompute,
    sources_of,
    value_of,
)
from amp_graph.passes.registry import Recomputable, declare, own_functions
from amp_graph.passes.torch_compat.autograd import outer_saved_tensors_hooks

own_functions(__name__)


def norm_and_relu_computed_again(x: Tensor, *given: Any) -> Tensor:
    """``norm_and_relu`` whose result can be recomputed."""
    return marked(norm_and_relu(x, *given), (x, *_parameters(given)))


def norm_alone_computed_again(x: Tensor, *given: Any) -> Tensor:
    """``norm_alone`` whose result can be recomputed."""
    return marked(norm_alone(x, *given), (x, *_parameters(given)))


def norm_add_relu_computed_again(x: Tensor, other: Tensor, *given: Any) -> Tensor:
    """``norm_add_relu`` that saves only ``x`` if ``other`` can be recomputed, or is saved by its producer."""
    before = other.grad_fn
    if not may_hook() or not is_known(before):
        return norm_add_relu(x, other, *given)
    out = norm_add_relu(x, other, *given, ask=_asked)
    if getattr(out.grad_fn, "ask", None) is not _asked:  # torch's own, in a transform
        return out
    node: Any = marked(out, (x, *_parameters(given))).grad_fn
    for source in (node.metadata[KEY], *sources_of(before)):
        source.readers += 1
    return out


def norm_add_relu_kept(x: Tensor, other: Tensor, *given: Any) -> Tensor:
    """``norm_add_relu`` whose saved result others can be recomputed from."""
    out = norm_add_relu(x, other, *given)
    return out if outer_saved_tensors_hooks() is None else marked(out, (out.detach(),))


def _parameters(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return weight and bias, which follow the running statistics."""
    return given[2:4]


def _asked(node: Any) -> Tensor:
    return computed(lambda: value_of(node))


def _norm_and_relu(node: Any) -> Tensor:
    inputs = node.metadata[KEY].inputs
    x, *given = inputs() if inputs else node.saved_tensors
    if not given:  # its own result, saved by hooks
        return x
    weight, bias, stats = (*given, None)[:3]
    other = value_of(node.next_functions[1][0]) if node.adds else None
    return normed_again(x, other, weight, bias, node.eps, node.relu, stats)


def _saves(call: Node, source: Node) -> bool:
    return call.args[0] is source  # what it adds to the norm is not saved


register_recompute(
    "_NormAndReluBackward", _norm_and_relu, kept=lambda node: node.saved_tensors[4], keeps=lambda node: bool(node.adds)
)
declare(norm_alone, recomputable=Recomputable(norm=True, replacement=norm_alone_computed_again))
declare(norm_alone_computed_again, recomputable=Recomputable(norm=True))
declare(norm_and_relu, recomputable=Recomputable("relu", norm=True, replacement=norm_and_relu_computed_again))
declare(norm_and_relu_computed_again, recomputable=Recomputable("relu", norm=True))
declare(
    norm_add_relu,
    saves=_saves,
    recomputable=Recomputable("relu", replacement=norm_add_relu_computed_again, keeps=norm_add_relu_kept, summand=1),
)
declare(norm_add_relu_computed_again, saves=_saves, recomputable=Recomputable("relu", summand=1))
declare(norm_add_relu_kept, saves=_saves, recomputable=Recomputable(summand=1))
