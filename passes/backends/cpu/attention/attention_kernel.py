"""bf16 attention on the CPU, and its gradients, by compiled C.

Before: torch's flash kernel.
After: ``forward(q, k, v, mask, causal, scale)``, ``attention_kernel.c`` on strided tensors; ``None`` without a
compiler, or if the CPU or the tensors are unsupported.
"""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import PARTS, threads_for
from amp_graph.passes.native.kernel_table import NUMBER, STRUCT, best, kernel, required
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("attention_kernel.c")
FULL, LOW, NONE = 1, 2, 0  # the kernel's codes for mask precisions, and for no mask


FUNCTIONS = {"attention": (STRUCT, NUMBER)}
# The kernels of forward and of backward; None where nothing can be compiled, or the CPU lacks their instructions.
library = kernel("attention", lambda low: best(SOURCE, PARTS[False]), FUNCTIONS)
backward_library = kernel("attention_backward", lambda low: best(SOURCE, PARTS[True]), FUNCTIONS)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether the kernel supports these operands, of four dimensions, whose last stride is 1."""
    alike = query.dtype == key.dtype == value.dtype == torch.bfloat16 and query.device.type == "cpu"
    shares = query.shape[1] % key.shape[1] == 0 if key.shape[1] else query.shape[1] == 0
    fits = key.shape == value.shape and query.shape[0] == key.shape[0] and shares
    return alike and fits and query.shape[3] == key.shape[3] and query.shape[3] % 2 == 0 and library() is not None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kept: Tensor | None = None,
    dropped: float = 0.0,
) -> Tensor:
    """Return attention, [batch, heads, queries, width].

    query: [batch, heads, queries, width]; key, value: [batch, heads or a divisor of it, keys, width], all bf16 and
    accepted by ``takes``; mask: added to the scores, of 2 or 4 dimensions that broadcast; kept: the bits of the
    probabilities that a dropout of ``dropped`` keeps, as ``dropout_bits`` has them. Raises MemoryError.
    """
    made = result_like(query)
    _run((query, key, value, made, None, None, None, None), mask, causal, scale, kept, dropped)
    return made


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kept: Tensor | None = None,
    dropped: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for that of the result, ``grad``. Raises MemoryError."""
    made = gradients_like(query, key, value)
    _run((query, key, value, None, rows(grad), *made), mask, causal, scale, kept, dropped)
    return made


def backward_with_mask(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    causal: bool,
    scale: float,
    kept: Tensor | None = None,
    dropped: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same, and the gradient of ``mask``, in its dtype: summed in fp32. Raises MemoryError."""
    made = gradients_like(query, key, value)
    batches = 1 if mask.dim() == 2 else mask.shape[0]
    sums = query.new_zeros((batches, *query.shape[1:3], key.shape[2]), dtype=torch.float32)
    _run((query, key, value, None, rows(grad), *made), mask, causal, scale, kept, dropped, sums)
    return *made, sums.sum_to_size(mask.shape).to(mask.dtype)


def result_like(query: Tensor) -> Tensor:
    """Return memory for a result in the layout of torch's kernel: as the queries, without gaps."""
    return torch.empty_like(query)


def gradients_like(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients: in the layout of their tensors, or contiguous where heads share a key."""
    shares = query.shape[1] != key.shape[1]
    return torch.empty_like(query.contiguous() if shares else query), torch.empty_like(key), torch.empty_like(value)


def rows(t: Tensor) -> Tensor:
    """Return ``t`` with contiguous rows."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _run(
    tensors: tuple[Tensor | None, ...],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kept: Tensor | None,
    dropped: float,
    mask_sums: Tensor | None = None,
) -> None:
    query, key, _, made = tensors[:4]
    compiled = required(backward_library() if made is None else library())
    assert query is not None
    assert key is not None
    (batch, heads, length, width), keys = query.shape, key.shape[2]
    numbers = [batch, heads, heads // max(1, key.shape[1]), length, keys, width, causal, made is None]
    mask = None if mask is None else _mask_of(mask).expand(batch, heads, length, keys)
    sums = None if mask_sums is None else mask_sums.expand(batch, heads, length, keys)
    for t in (*tensors, mask, sums):
        numbers += (0, 0, 0, 0) if t is None else (address_of(t), *t.stride()[:3])
    kind = NONE if mask is None else FULL if mask.dtype == torch.float32 else LOW
    numbers += (kind, 0 if mask is None else mask.stride(3), 0 if kept is None else address_of(kept))
    table = array("q", numbers).tobytes() + struct.pack("dd", scale, 1 / (1 - dropped))
    if compiled.attention(table, threads_for(batch * heads * length * keys)):
        raise MemoryError(f"attention of {batch} x {heads} x {length} x {keys}: no memory for its rows")


def _mask_of(mask: Tensor) -> Tensor:
    """Return ``mask`` in a precision that the kernel supports, with contiguous keys."""
    if mask.dtype not in (torch.float32, torch.bfloat16):
        mask = mask.float()
    return mask if mask.shape[-1] == 1 or mask.stride(-1) in (0, 1) else mask.contiguous()
