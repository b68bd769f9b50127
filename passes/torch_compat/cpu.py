"""CPU instruction sets: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch


def cpu_has_amx() -> bool:
    """Say whether this CPU has matrix units for bfloat16; False if torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # 2.11 - 2.13


def cpu_has_bf16() -> bool:
    """Say whether this CPU computes dot products of bfloat16; False if torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())  # 2.11 - 2.13


def multiplies_bf16() -> bool:
    """Say whether the CPU has instructions for bf16 matmuls: AVX-512 dot products, or matrix units."""
    return cpu_has_bf16() or cpu_has_amx()
