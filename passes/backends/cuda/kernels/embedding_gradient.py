"""The gradient of an embedding table by Triton on CUDA, in one write of the table.

Before: ``embedding_dense_backward(grad.float(), ids, ...)``: an fp32 copy of the gradient, a table of zeros, and sums
that are written over some of its rows; then ``+ low.float()``, if a product reads the same table in low precision.
After: ``embedding_gradient(grad, ids, count, padding, low)``.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from amp_graph.passes.memory.gradient_buffers import spread
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.native.triton_loader import launch, require

SOURCE = "amp_graph.passes.backends.cuda.kernels.embedding_gradient_source"
PART = 64  # indices of one row that a program sums
ROWS = 4  # of them at once
BLOCK = 1024  # numbers of a row per program of 4 warps


def embedding_gradient(grad: Tensor, ids: Tensor, count: int, padding: int, base: Tensor | None = None) -> Tensor:
    """Return the gradient of a table of ``count`` rows, fp32 [count, width], of which ``ids`` were read.

    grad: [*ids.shape, width], low precision or fp32; or [bags, width] for ``ids`` [bags, length], whose rows were
    summed. padding: the row whose indices have no gradient; negative: none. base: [count, width], is added in fp32.
    Torch computes it where no kernel can be launched.
    """
    table = grad.new_empty((count, grad.shape[-1]), dtype=torch.float32)
    if not table.numel():
        return table
    if not ids.numel():
        return table.zero_() if base is None else table.copy_(base)
    try:
        _write(table, grad, ids, padding, base)
    except CompilerError:
        return _by_torch(grad, ids, count, padding, base)
    return table


def _by_torch(grad: Tensor, ids: Tensor, count: int, padding: int, base: Tensor | None) -> Tensor:
    rows, flat = spread(grad, ids, grad.dim() == ids.dim())
    table: Tensor = torch.ops.aten.embedding_dense_backward(rows.float(), flat, count, padding, False)
    return table if base is None else table.add_(base)


def _write(table: Tensor, grad: Tensor, ids: Tensor, padding: int, base: Tensor | None) -> None:
    """Write the sums to ``table`` by Triton. Raises CompilerError if a kernel cannot be launched."""
    count, width = table.shape
    rows = grad.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    length = ids.numel() // rows.shape[0]
    ordered, order = ids.reshape(-1).sort(stable=True)
    row_numbers = torch.arange(count + 1, dtype=ids.dtype, device=ids.device)
    starts = torch.searchsorted(ordered, row_numbers, out_int32=ids.numel() < 2**31)
    block = min(BLOCK, max(16, 1 << (width - 1).bit_length()))
    blocks, whole = -(-width // block), ids.numel() // PART
    numbers = (width, blocks, length, rows.stride(0))
    options = {"PART": PART, "ROWS": ROWS, "BLOCK": block}
    parts = table.new_empty((whole, width))
    if whole:
        launch(SOURCE, "parts_kernel", whole * blocks, (rows, order, ordered, parts, *numbers), warps=4, **options)
    given = (rows, order, starts, parts, table if base is None else base.contiguous(), table, *numbers, padding)
    launch(SOURCE, "table_kernel", count * blocks, given, warps=4, BASED=base is not None, **options)


define_operator(
    "embedding_gradient(Tensor grad, Tensor ids, SymInt count, int padding, Tensor? base=None) -> Tensor",
    embedding_gradient,
    lambda grad, ids, count, *_: grad.new_empty((count, grad.shape[-1]), dtype=torch.float32),
)


def kernels(low: torch.dtype) -> SimpleNamespace:
    """Return the operator. Raises CompilerError where no kernel runs, with the reason."""
    require(SOURCE, why_wrong)
    return KERNELS


KERNELS = SimpleNamespace(backward=OPS.embedding_gradient)
register_kernel("embedding_gradient on cuda", kernels)


def why_wrong(device: torch.device) -> str:
    """Return how the kernels differ from torch on a small table of ``device``, or ""."""
    ids = torch.arange(3 * PART, device=device) % 11
    ids[PART // 2 :] = 5
    grad = torch.linspace(-3, 3, 37 * ids.numel(), dtype=torch.float32, device=device).view(-1, 37).sin()
    for given in (grad, grad.bfloat16()):
        exact = torch.zeros(13, 37, dtype=torch.float64, device=device).index_add_(0, ids, given.double())
        exact[2] = 0
        made = embedding_gradient(given, ids, 13, 2)
        more = embedding_gradient(given, ids, 13, 2, made)
        if not all(torch.allclose(a.double(), b, rtol=1e-5, atol=1e-4) for a, b in ((made, exact), (more, 2 * exact))):
            return "its numbers are not torch's on this device"
    return ""
