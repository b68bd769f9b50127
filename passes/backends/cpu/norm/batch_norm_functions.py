"""Batch norms in training for converted graphs, with the following relu, or sum and relu.

Before: ``relu(batch_norm(x, ...))``.
After: ``norm_and_relu(x, ...)``, which saves only ``x`` and its statistics, as does ``norm_alone`` without a relu.
``relu(batch_norm(x, ...) + other)`` becomes ``norm_add_relu(x, other, ...)``, which saves its result, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from amp_graph.passes.backends.cpu.norm.batch_norm_kernel import (
    batch_norm_relu,
    batch_norm_relu_again,
    batch_norm_relu_backward,
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
from amp_graph.passes.native.operator_library import called
from amp_graph.passes.registry import Traits, declare, own_functions
from amp_graph.passes.torch_compat.autograd import (
    gradients_by_torch,
    is_plain,
    leaves_to_torch,
    outer_saved_tensors_hooks,
)

own_functions(__name__)


def norm_and_relu(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> Tensor:
    """Return ``F.relu(F.batch_norm(x, ..., training=True))``, without the relu if it is not wanted.

    x: bf16 or fp16 images on the CPU, channels_last; weight, bias, running statistics: fp32 [channels], the latter are
    written. Sums are fp32 and fp64, results and gradients are rounded once. Raises ValueError for one value per
    channel, as torch does.
    """
    return norm_add_relu(x, None, running_mean, running_var, weight, bias, momentum, eps, relu)


def norm_alone(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``F.batch_norm(x, ..., training=True)``; all else as for ``norm_and_relu``."""
    return norm_and_relu(x, running_mean, running_var, weight, bias, momentum, eps, False)


def norm_add_relu(
    x: Tensor,
    other: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
    *,
    ask: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """Return ``F.relu(F.batch_norm(x, ..., training=True) + other)``, rounded once.

    other: of the shape and dtype of ``x``, or None; ask: returns the result in backward, given autograd's node, so that
    it is not saved; all else as for ``norm_and_relu``.
    """
    if x.numel() and x.numel() <= x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    # Torch leaves the running statistics unchanged if there are no values.
    if not x.numel() or leaves_to_torch(x, other, weight, bias):
        plain = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
        plain = plain if other is None else plain + other
        return F.relu(plain) if relu else plain
    given = (x, other, running_mean, running_var, weight, bias, momentum, eps, relu)
    made = _NormAndRelu.apply(ask, *given) if torch.is_grad_enabled() else called(batch_norm_relu, *given)
    out: Tensor = made[0]
    return out


class _NormAndRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ask: Any, x: Tensor, other: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
        out, stats = called(batch_norm_relu, x, other, *given)
        *_, weight, bias, _, ctx.eps, ctx.relu = given
        ctx.adds, ctx.ask = other is not None, ask
        ctx.save_for_backward(x, weight, bias, stats, out if ctx.adds and ask is None else None)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return out, stats

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 10
        dx, dother, dweight, dbias = (_gradients_by_torch if is_plain(grad) else _gradients)(ctx, grad)
        return None, dx, dother, None, None, dweight, dbias, None, None, None


def _result(ctx: Any, saved: Tensor | None) -> Tensor | None:
    """Return the result after a sum, whose sign is the relu's mask; None without a sum."""
    found: Tensor | None = ctx.ask(ctx) if ctx.adds and saved is None else saved
    return found


# Of x, of what is added, of weight and bias; None where it is not wanted.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _gradients(ctx: Any, grad: Tensor) -> Gradients:
    x, weight, bias, stats, out = ctx.saved_tensors
    need, out = ctx.needs_input_grad[1:], _result(ctx, out)
    given = (x, out, weight, bias, stats, ctx.relu, need[0])
    dweight, dbias, *images = called(batch_norm_relu_backward, grad, *given)
    dx, dother = images[-1] if need[0] else None, images[0] if need[1] else None
    return dx, dother, dweight if need[4] else None, dbias if need[5] else None


def _gradients_by_torch(ctx: Any, grad: Tensor) -> Gradients:
    """Return the gradients by operations that have a second derivative, for ``create_graph=True``."""
    x, weight, bias, _, total = ctx.saved_tensors
    need, total = ctx.needs_input_grad[1:], _result(ctx, total)
    if total is not None:
        grad = torch.where(total <= 0, 0, grad)

    def again(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = F.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.eps)
        return F.relu(out) if ctx.relu and total is None else out

    dx, dweight, dbias = gradients_by_torch(again, (x, weight, bias), (need[0], need[4], need[5]), (grad,))
    return dx, grad if need[1] else None, dweight, dbias


# Weight and bias follow the running statistics in what is ``given`` besides ``x``.
# -- recomputed in backward ----------------------------------------------------------------------------


def norm_and_relu_computed_again(x: Tensor, *given: Any) -> Tensor:
    """``norm_and_relu`` whose result can be recomputed."""
    return marked(norm_and_relu(x, *given), (x, *given[2:4]))


def norm_alone_computed_again(x: Tensor, *given: Any) -> Tensor:
    """``norm_alone`` whose result can be recomputed."""
    return marked(norm_alone(x, *given), (x, *given[2:4]))


def norm_add_relu_computed_again(x: Tensor, other: Tensor, *given: Any) -> Tensor:
    """``norm_add_relu`` that saves only ``x`` if ``other`` can be recomputed, or is saved by its producer."""
    before = other.grad_fn
    if not may_hook() or not is_known(before):
        return norm_add_relu(x, other, *given)
    out = norm_add_relu(x, other, *given, ask=_asked)
    if getattr(out.grad_fn, "ask", None) is not _asked:  # torch's own, in a transform
        return out
    node: Any = marked(out, (x, *given[2:4])).grad_fn
    for source in (node.metadata[KEY], *sources_of(before)):
        source.readers += 1
    return out


def norm_add_relu_kept(x: Tensor, other: Tensor, *given: Any) -> Tensor:
    """``norm_add_relu`` whose saved result others can be recomputed from."""
    out = norm_add_relu(x, other, *given)
    return out if outer_saved_tensors_hooks() is None else marked(out, (out.detach(),))


def _asked(node: Any) -> Tensor:
    return computed(lambda: value_of(node))


def _norm_and_relu(node: Any, inputs: list[Any] | None) -> Tensor:
    x, *given = inputs or node.saved_tensors
    if not given:  # its own result, saved by hooks
        return x
    weight, bias, stats = (*given, None)[:3]
    other = value_of(node.next_functions[1][0]) if node.adds else None
    if stats is None:  # which are computed again
        return called(batch_norm_relu, x, other, None, None, weight, bias, 0.0, node.eps, node.relu)[0]
    return called(batch_norm_relu_again, x, other, weight, bias, stats, node.relu)


def _saves(call: Node, source: Node) -> bool:
    return call.args[0] is source  # what it adds to the norm is not saved


register_recompute(
    "_NormAndReluBackward", _norm_and_relu, kept=lambda node: node.saved_tensors[4], keeps=lambda node: bool(node.adds)
)
declare(norm_alone, Traits(norm=True, replacement=norm_alone_computed_again))
declare(norm_alone_computed_again, Traits(norm=True))
declare(norm_and_relu, Traits(kind="relu", norm=True, replacement=norm_and_relu_computed_again))
declare(norm_and_relu_computed_again, Traits(kind="relu", norm=True))
declare(
    norm_add_relu,
    Traits(_saves, "relu", replacement=norm_add_relu_computed_again, keeps=norm_add_relu_kept, summand=1),
)
declare(norm_add_relu_computed_again, Traits(_saves, "relu", summand=1))
declare(norm_add_relu_kept, Traits(_saves, summand=1))
