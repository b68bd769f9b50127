"""Sizes from which on Triton kernels are chosen on CUDA, by the bytes that they save: none was timed.

Before: a kernel for whatever fits it. After: ``if cross_entropy_kernel_is_profitable("cuda", ...)``. Rates are those of
an H100, 2.9 TB/s; ``benchmarks/gpu/kernels.py`` measures each kernel against torch's operations.
"""

from __future__ import annotations

# Bytes from which on a call of ours, with its launches and its Python, is worth it: 23 us, as long as five launches.
LEAST_SPARED = 1 << 26


OF_COPIES, OF_GRADIENTS = 4, 8  # bytes spared per weight


def update_kernel_is_profitable(spared: int) -> bool:
    """Say whether an optimizer's update in one pass, which spares so many bytes, beats torch's kernels.

    Computed, per weight with a copy: 4 bytes, as the update writes the copy and no cast reads the weight; 8 more where
    it reads backward's own low-precision gradient, which is upcast otherwise. A loss scale and clipping spare more.
    """
    return spared >= LEAST_SPARED
