"""What the CPU's instructions are: private names of torch.

Each with the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch


def cpu_has_amx() -> bool:
    """Say whether this CPU has matrix units for bfloat16; False where torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # 2.11 - 2.13


def cpu_has_bf16() -> bool:
    """Say whether this CPU computes dot products of bfloat16; False where torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())  # 2.11 - 2.13


def multiplies_bf16() -> bool:
    """Say whether the CPU has instructions that multiply bf16: dot products of AVX-512, or matrix units."""
    return cpu_has_bf16() or cpu_has_amx()
