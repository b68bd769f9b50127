"""The cross entropy of a language model for converted graphs: low-precision logits, processed row by row.

Before: ``cross_entropy(logits.float(), target)``, which makes two fp32 tensors of the size of the logits, saves one for
backward, and makes two more there.
After: ``cross_entropy_low(logits, target)``, which saves the bf16 logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.loss.cross_entropy_kernel import losses_of_rows, write_gradient_of_rows
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_operator
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch

own_functions(__name__)

# fp32 logits per block: few enough for a core's cache, enough to make the calls' cost negligible.
CHUNK = 1 << 19


def cross_entropy_low(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(logits.float().view(-1, classes), target, ...)`` that makes no fp32 tensor of that size.

    logits: bf16 or fp16 [..., classes]; target: int64 [rows], the product of the leading sizes; weight: fp32
    [classes], without gradient. Returns fp32: a scalar, or [rows] for "none". The logits' gradient is computed in fp32
    and rounded once. Raises what ``gather`` raises for a target that is no class.
    """
    return cross_entropy_and_logits(logits, target, weight, ignore_index, reduction, label_smoothing, False)[0]


def cross_entropy_and_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    widened: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``cross_entropy_low``, and ``logits.float()`` for other readers, whose gradients are added in fp32."""
    if leaves_to_torch(logits, target, weight):
        wide = logits.float()
        return _by_torch(wide, target, weight, ignore_index, reduction, label_smoothing), wide
    rows, wide = _CrossEntropy.apply(logits, target, weight, ignore_index, label_smoothing, widened)
    return _reduced(rows, target, weight, ignore_index, reduction), wide


def _by_torch(
    wide: Tensor, target: Tensor, weight: Tensor | None, ignore: int, reduction: str, smooth: float
) -> Tensor:
    return F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        target,
        weight,
        ignore_index=ignore,
        reduction=reduction,
        label_smoothing=smooth,
    )


def _reduced(rows: Tensor, target: Tensor, weight: Tensor | None, ignore: int, reduction: str) -> Tensor:
    """Return the rows' losses, their sum, or the sum over the weights of the counted targets."""
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / _weights(target, weight, ignore).sum()


def _weights(target: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
    """Return the weight of each row's target, fp32 [rows]: 0 for ignored ones."""
    counts = target != ignore
    if weight is None:
        return counts.float()
    return torch.where(counts, weight[_places(target, ignore)], 0.0)


def _places(target: Tensor, ignore: int) -> Tensor:
    """Return the class that each row reads: its target, or any if that is ignored."""
    return target.masked_fill(target == ignore, 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smooth: float, widened: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.ignore, ctx.smooth = ignore, smooth
        ctx.set_materialize_grads(False)
        rows = OPS.cross_entropy_rows(logits, target, weight, ignore, smooth)
        ctx.save_for_backward(logits, target, weight)
        return rows, logits.float() if widened else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_wide: Tensor | None) -> Any:
        logits, target, weight = ctx.saved_tensors
        if grad is None:
            found = None if grad_wide is None else grad_wide.to(logits.dtype)
        elif not is_plain(grad, grad_wide):
            how = (ctx.ignore, ctx.smooth)
            found = OPS.cross_entropy_backward(grad, logits, target, weight, grad_wide, *how)
        else:
            again = lambda wide: _by_torch(wide, target, weight, ctx.ignore, "none", ctx.smooth)  # noqa: E731
            (found,) = gradients_by_torch(again, (logits.float(),), (True,), (grad,))
            assert found is not None, "a loss depends on the logits"
            found = (found if grad_wide is None else found + grad_wide).to(logits.dtype)
        return found, None, None, None, None, None


def cross_entropy_rows(logits: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smooth: float) -> Tensor:
    """Return the loss of each row, fp32 [rows]; 0 where the target is ignored. See ``cross_entropy_low``."""
    flat = logits.reshape(-1, logits.shape[-1])
    if weight is None and not smooth and (found := losses_of_rows(flat, target, ignore)) is not None:
        return found
    own = _weights(target, weight, ignore)
    index = _places(target, ignore).unsqueeze(1)
    losses = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
    for part, wide in _parts(flat):
        chances = torch.log_softmax(wide, 1, out=wide)
        losses[part] = chances.gather(1, index[part]).squeeze(1).mul_(-own[part])
        if smooth:
            spread = chances.sum(1) if weight is None else chances @ weight
            losses[part] = losses[part] * (1 - smooth) - spread * (smooth / flat.shape[1])
    return losses.masked_fill_(target == ignore, 0)


def _parts(flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of at most ``CHUNK`` numbers, or of one row, with those rows in fp32, in reused memory."""
    rows, classes = flat.shape
    most = CHUNK if flat.device.type == "cpu" else CHUNK << 7  # elsewhere launches take long, and caches are small
    at_once = min(rows, max(1, most // max(1, classes)))
    scratch = torch.empty(at_once, classes, dtype=torch.float32, device=flat.device)
    for start in range(0, rows, max(1, at_once)):
        part = slice(start, start + at_once)
        yield part, scratch[: min(rows, start + at_once) - start].copy_(flat[part])


def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad_wide: Tensor | None,
    ignore: int,
    smooth: float,
    *,
    made: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits, of their dtype and shape, for the gradient ``grad`` of the rows' losses.

    ``grad_wide`` (fp32, shape of the logits) is the gradient of other readers of the upcast logits, added before the
    single rounding. ``made``: where to write it, contiguous. It may be the logits: each row is read before it is
    written.
    """
    made = torch.empty_like(logits, memory_format=torch.contiguous_format) if made is None else made
    flat, rows = (t.reshape(-1, logits.shape[-1]) for t in (logits, made))
    others = None if grad_wide is None else grad_wide.reshape(flat.shape)
    whole, at_target, each = _coefficients(grad, target, weight, ignore, smooth, flat.shape[1])
    if each is None and write_gradient_of_rows(rows, flat, target, ignore, whole, at_target, others):
        return made
    index = _places(target, ignore).unsqueeze(1)
    for part, wide in _parts(flat):
        found = torch.softmax(wide, 1, out=wide).mul_(whole[part])
        found.scatter_add_(1, index[part], at_target[part])
        if each is not None:
            found.sub_(each[part] if weight is None else each[part] * weight)
        rows[part] = found if others is None else found.add_(others[part])
    return made


def cross_entropy_backward_(grad: Tensor, logits: Tensor, *given: Any) -> Tensor:
    """``cross_entropy_backward`` that writes the gradient over the logits, and returns them."""
    made = cross_entropy_backward(grad, logits, *given, made=logits if logits.is_contiguous() else None)
    return made if made is logits else logits.copy_(made)


def _coefficients(
    grad: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smooth: float, classes: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return, each [rows, 1], the factor of a row's softmax, the term at its target, and the term of every class."""
    counts = target != ignore
    grad = torch.where(counts, grad, 0.0)  # not a product: if no row counts, its gradient is 0 / 0
    own = grad * _weights(target, weight, ignore) * (1 - smooth)
    if not smooth:
        return own.unsqueeze(1), -own.unsqueeze(1), None
    each = grad * (smooth / classes)
    total = classes if weight is None else weight.sum()
    return (own + each * total).unsqueeze(1), -own.unsqueeze(1), each.unsqueeze(1)


def _fake_rows(logits: Tensor, target: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(target, dtype=torch.float32)


def _fake_backward(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


# Operators, so that a traced graph (TrainStep's) has one node each and not the loop.
define_operator(
    "cross_entropy_rows(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float smoothing) -> Tensor",
    cross_entropy_rows,
    _fake_rows,
)
define_operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, Tensor? grad_wide,"
    " int ignore_index, float smoothing) -> Tensor",
    cross_entropy_backward,
    _fake_backward,
)
define_operator(
    "cross_entropy_backward_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor? weight, Tensor? grad_wide,"
    " int ignore_index, float smoothing) -> Tensor(a!)",
    cross_entropy_backward_,
    lambda grad, logits, *_: logits,
)
