"""The cross entropy of a language model for converted graphs: low-precision logits, processed row by row.

Before: ``cross_entropy(logits.float(), target)``, which makes two fp32 tensors of the size of the logits, saves one for
backward, and makes two more there.
After: ``cross_entropy_low(logits, target)``, which saves the bf16 logits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import NUMBER, STRUCT, kernel, run
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_operator
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch

SOURCE = Path(__file__).with_name("cross_entropy_kernel.c")
LOW, NONE = 2, 0  # the kernel's codes for low precision, and for none

FUNCTIONS = {"rows": (STRUCT, NUMBER), "backward": (STRUCT, NUMBER)}
# What is compiled for bf16 or fp16; None where nothing can be compiled.
library = kernel("cross_entropy", lambda low: load_if_possible(SOURCE, MACROS[low]), FUNCTIONS)


def losses_of_rows(flat: Tensor, target: Tensor, ignore: int) -> Tensor | None:
    """Return the loss of each row of ``flat`` [rows, classes] as fp32 [rows], 0 where the target is ``ignore``."""
    found = _compiled(flat, target, ignore)
    if found is None:
        return None
    kernels, flat, places = found
    losses = torch.empty(flat.shape[0], dtype=torch.float32)
    table = (*flat.shape, flat, LOW, 0, NONE, places, 0, 0, 0, losses)
    run(kernels.rows, "cross entropy", table, threads_for(flat.numel()))
    return losses


def _compiled(flat: Tensor, target: Tensor, ignore: int) -> tuple[ctypes.CDLL, Tensor, Tensor] | None:
    """Return the kernels for ``flat``, its contiguous rows, and the targets, -1 for ignored ones.

    None if there are none for it, or if a counted target is no class: others raise where torch looks them up.
    """
    fits = type(flat) in (Tensor, torch.nn.Parameter) and flat.device.type == "cpu" and flat.dtype in MACROS
    found = library(flat.dtype) if fits and flat.numel() else None
    if found is None or not _are_classes(target, ignore, flat.shape[1]):
        return None
    return found, flat.contiguous(), target.masked_fill(target == ignore, -1).contiguous()


def _are_classes(target: Tensor, ignore: int, classes: int) -> bool:
    counted = target[target != ignore]
    return not counted.numel() or (0 <= int(counted.min()) and int(counted.max()) < classes)


own_functions(__name__)


def cross_entropy_low(logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """``F.cross_entropy(logits.float().view(-1, classes), target, ...)`` that makes no fp32 tensor of that size.

    logits: bf16 or fp16 [..., classes]; target: int64 [rows], the product of the leading sizes. Returns fp32: a scalar,
    or [rows] for "none". The logits' gradient is computed in fp32 and rounded once. Raises what torch raises for a
    target that is no class.
    """
    return cross_entropy_and_logits(logits, target, ignore_index, reduction, False)[0]


def cross_entropy_and_logits(
    logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", widened: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``cross_entropy_low``, and ``logits.float()`` for other readers, whose gradients are added in fp32."""
    if leaves_to_torch(logits, target):
        wide = logits.float()
        return _by_torch(wide, target, ignore_index, reduction), wide
    rows, wide = _CrossEntropy.apply(logits, target, ignore_index, widened)
    if reduction == "none":
        return rows, wide
    total = rows.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum(), wide


def _by_torch(wide: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    return F.cross_entropy(wide.reshape(-1, wide.shape[-1]), target, ignore_index=ignore, reduction=reduction)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore: int, widened: bool) -> tuple[Tensor, Tensor | None]:
        ctx.ignore = ignore
        ctx.set_materialize_grads(False)
        rows = OPS.cross_entropy_rows(logits, target, ignore)
        ctx.save_for_backward(logits, target)
        return rows, logits.float() if widened else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_wide: Tensor | None) -> Any:
        logits, target = ctx.saved_tensors
        if grad is None:
            found = None if grad_wide is None else grad_wide.to(logits.dtype)
        elif not is_plain(grad, grad_wide):
            found = OPS.cross_entropy_backward(grad, logits, target, grad_wide, ctx.ignore)
        else:
            again = lambda wide: _by_torch(wide, target, ctx.ignore, "none")  # noqa: E731
            (found,) = gradients_by_torch(again, (logits.float(),), (True,), (grad,))
            assert found is not None, "a loss depends on the logits"
            found = (found if grad_wide is None else found + grad_wide).to(logits.dtype)
        return found, None, None, None


def cross_entropy_rows(logits: Tensor, target: Tensor, ignore: int) -> Tensor:
    """Return the loss of each row, fp32 [rows]; 0 where the target is ignored. See ``cross_entropy_low``."""
    found = losses_of_rows(logits.reshape(-1, logits.shape[-1]), target, ignore)
    return _by_torch(logits.float(), target, ignore, "none") if found is None else found


def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    grad_wide: Tensor | None,
    ignore: int,
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
    others = None if grad_wide is None else grad_wide.reshape(flat.shape).contiguous()
    counts = target != ignore
    whole = torch.where(counts, grad.float(), 0.0).unsqueeze(1)  # no product: if no row counts, its gradient is 0 / 0
    known = _compiled(flat, target, ignore)
    if known is None:
        found = torch.softmax(flat.float(), 1).mul_(whole)
        found.scatter_add_(1, torch.where(counts, target, 0).unsqueeze(1), -whole)
        rows.copy_(found if others is None else found.add_(others))
    else:
        kernels, flat, places = known
        table = (*flat.shape, flat, LOW, rows, LOW, places, whole, -whole, others, 0)
        run(kernels.backward, "cross entropy", table, threads_for(flat.numel()))
    return made


def cross_entropy_backward_(grad: Tensor, logits: Tensor, *given: Any) -> Tensor:
    """``cross_entropy_backward`` that writes the gradient over the logits, and returns them."""
    made = cross_entropy_backward(grad, logits, *given, made=logits if logits.is_contiguous() else None)
    return made if made is logits else logits.copy_(made)


# Operators, so that a traced graph (TrainStep's) has one node each and not the loop.
define_operator(
    "cross_entropy_rows(Tensor logits, Tensor target, int ignore_index) -> Tensor",
    cross_entropy_rows,
    lambda logits, target, _: torch.empty_like(target, dtype=torch.float32),
)
define_operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor? grad_wide, int ignore_index) -> Tensor",
    cross_entropy_backward,
    lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
define_operator(
    "cross_entropy_backward_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor? grad_wide, int ignore_index)"
    " -> Tensor(a!)",
    cross_entropy_backward_,
    lambda grad, logits, *_: logits,
)
