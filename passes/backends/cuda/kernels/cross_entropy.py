"""The cross entropy of low-precision logits, and its gradient, by Triton on CUDA.

Before: ``log_softmax(logits.float())``, two fp32 tensors of the size of the logits, of which one is saved.
After: ``losses, stats = cross_entropy_and_stats(logits, target, ...)``, which saves the logits and two numbers a row.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_backward, cross_entropy_rows
from amp_graph.passes.backends.cpu.loss.logits_gradient_in_place import IN_PLACE
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.native.triton_loader import launch, require

SOURCE = "amp_graph.passes.backends.cuda.kernels.cross_entropy_source"
BLOCK = 4096  # logits per step of a program of 8 warps: 16 per thread


def cross_entropy_and_stats(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smooth: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, fp32 [rows], 0 where the target is ignored; and fp32 [2, rows] for backward.

    See ``cross_entropy_low``. A target that is no class is an error of the device, as with torch; its loss is NaN.
    Where the kernel cannot be compiled torch computes the losses a few rows at a time; ``stats`` is empty then.
    """
    flat = _flat(logits)
    rows, classes = flat.shape
    losses, stats = flat.new_empty(rows, dtype=torch.float32), flat.new_empty((2, rows), dtype=torch.float32)
    if not flat.numel():
        return losses.fill_(torch.nan), stats
    legal = torch.ones((), dtype=torch.uint8, device=flat.device)
    weight = None if weight is None else weight.contiguous()
    given = (flat, target.contiguous(), flat if weight is None else weight, losses, stats, legal)
    numbers = (rows, flat.stride(0), classes, ignore, 1 - smooth, smooth / classes)
    options = {"WEIGHTED": weight is not None, "SMOOTHED": bool(smooth)}
    try:
        launch(SOURCE, "rows_kernel", rows, (*given, *numbers), **options, BLOCK=_block(classes))
    except CompilerError:
        return cross_entropy_rows(logits, target, weight, ignore, smooth), stats.new_empty((2, 0))
    torch._assert_async(
        legal.view(torch.bool), "cross_entropy: an index of target is out of bounds"
    )  # waits for nothing
    return losses, stats


def cross_entropy_backward_of_stats(
    grad: Tensor,
    logits: Tensor,
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad_wide: Tensor | None,
    ignore: int,
    smooth: float,
    *,
    made: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits as ``cross_entropy_backward`` does, from the ``stats`` of the forward pass.

    ``made``: where to write it, contiguous. It may be the logits: each of them is read before it is written.
    """
    again = (grad, logits, target, weight, grad_wide, ignore, smooth)
    made = torch.empty_like(logits, memory_format=torch.contiguous_format) if made is None else made
    if not logits.numel():
        return made
    if not stats.numel():
        return cross_entropy_backward(*again, made=made)
    flat = _flat(logits)
    rows, classes = flat.shape
    block = _block(classes)
    blocks = -(-classes // block)
    others = made if grad_wide is None else grad_wide.contiguous()
    weight = None if weight is None else weight.contiguous()
    sums = (stats, stats) if weight is None else (weight, weight.sum() if smooth else stats)
    given = (flat, made, target.contiguous(), *sums, stats, grad, others)
    numbers = (rows, flat.stride(0), classes, blocks, grad.stride(0), ignore, 1 - smooth, smooth / classes)
    options = {"WEIGHTED": weight is not None, "SMOOTHED": bool(smooth), "ADDED": grad_wide is not None}
    try:
        launch(SOURCE, "gradient_kernel", rows * blocks, (*given, *numbers), **options, BLOCK=block)
    except CompilerError:
        return cross_entropy_backward(*again, made=made)
    return made


def cross_entropy_backward_of_stats_(grad: Tensor, logits: Tensor, *given: Any) -> Tensor:
    """``cross_entropy_backward_of_stats`` that writes the gradient over the logits, and returns them."""
    made = cross_entropy_backward_of_stats(grad, logits, *given, made=logits if logits.is_contiguous() else None)
    return made if made is logits else logits.copy_(made)


def _flat(logits: Tensor) -> Tensor:
    """Return the logits as rows, whose classes lie side by side; the rows may be apart."""
    *leading, classes = logits.shape
    flat = logits.reshape(math.prod(leading), classes)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _block(classes: int) -> int:
    return min(BLOCK, max(16, 1 << (classes - 1).bit_length()))


def _fake_stats(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return target.new_empty(target.shape, dtype=torch.float32), target.new_empty(
        (2, *target.shape), dtype=torch.float32
    )


define_operator(
    "cross_entropy_and_stats(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float smoothing)"
    " -> (Tensor, Tensor)",
    cross_entropy_and_stats,
    _fake_stats,
)
define_operator(
    "cross_entropy_backward_of_stats(Tensor grad, Tensor logits, Tensor stats, Tensor target, Tensor? weight,"
    " Tensor? grad_wide, int ignore_index, float smoothing) -> Tensor",
    cross_entropy_backward_of_stats,
    lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
define_operator(
    "cross_entropy_backward_of_stats_(Tensor grad, Tensor(a!) logits, Tensor stats, Tensor target, Tensor? weight,"
    " Tensor? grad_wide, int ignore_index, float smoothing) -> Tensor(a!)",
    cross_entropy_backward_of_stats_,
    lambda grad, logits, *_: logits,
)
IN_PLACE[OPS.cross_entropy_backward_of_stats.default] = OPS.cross_entropy_backward_of_stats_.default


def kernels(low: torch.dtype) -> SimpleNamespace:
    """Return the operators of both directions. Raises CompilerError where no kernel runs, with the reason."""
    require(SOURCE, why_wrong)
    return KERNELS


KERNELS = SimpleNamespace(forward=OPS.cross_entropy_and_stats, backward=OPS.cross_entropy_backward_of_stats)
register_kernel("cross_entropy on cuda", kernels)


def why_wrong(device: torch.device) -> str:
    """Return how the kernels differ from torch on small logits of ``device``, or "": a compiler may be at fault."""
    x = torch.linspace(-4, 4, 3 * 37, dtype=torch.float32, device=device).view(3, 37).sin().mul_(5).bfloat16()
    target = torch.tensor([5, -100, 36], device=device)
    losses, stats = cross_entropy_and_stats(x, target, None, -100, 0.0)
    if not stats.numel():
        return "it did not compile"
    wide = x.float().requires_grad_()
    with torch.enable_grad():
        expected = F.cross_entropy(wide, target, reduction="none")
        (gradient,) = torch.autograd.grad(expected.sum(), wide)
    got = cross_entropy_backward_of_stats(torch.ones_like(losses), x, stats, target, None, None, -100, 0.0)
    close = torch.allclose(losses, expected, rtol=1e-5, atol=1e-6) and torch.allclose(
        got.float(), gradient, rtol=2**-7, atol=1e-6
    )
    return "" if close else "its numbers are not torch's on this device"
