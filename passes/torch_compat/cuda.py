"""Streams and settings of cuBLAS: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

from typing import Any

import torch


def stream_of(tensor: torch.Tensor) -> int | None:
    """Return the current stream for work on ``tensor``, 0 without streams; None while a CUDA graph is recorded."""
    if tensor.device.type != "cuda":
        return 0
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    found: int = torch._C._cuda_getCurrentRawStream(tensor.device.index)
    return found


_SUMS = ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
_HOW_FP16, _HOW_BF16, _IN_FP16 = (getattr(torch._C, f"_get_cublas_allow_{name}") for name in _SUMS)
_SET_FP16, _SET_BF16, _SET_IN_FP16 = (getattr(torch._C, f"_set_cublas_allow_{name}") for name in _SUMS)


def sums_of_products() -> tuple[Any, ...]:
    """Return cuBLAS's reduction settings: for fp16, for bf16, and whether fp16 accumulates in fp16; 2.11 - 2.13.

    Each of the first two is a pair: whether partial sums may be rounded before they are added, and whether split-K is
    allowed.
    """
    return _HOW_FP16(), _HOW_BF16(), _IN_FP16()


def set_sums_of_products(settings: tuple[Any, ...]) -> None:
    """Set what ``sums_of_products`` returns; 2.11 - 2.13."""
    fp16, bf16, in_fp16 = settings
    _SET_FP16(*fp16)
    _SET_BF16(*bf16)
    _SET_IN_FP16(in_fp16)
