"""CPU instruction sets: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch


# What torch runs on without AVX-512: another CPU, or ATEN_CPU_CAPABILITY in the environment, which must bind us as well.
WITHOUT_AVX512 = ("DEFAULT", "AVX2")


def cpu_has_amx() -> bool:
    """Say whether torch may use matrix units for bfloat16 of this CPU; False if torch cannot tell."""
    return _uses_avx512() and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # 2.11 - 2.13


def cpu_has_bf16() -> bool:
    """Say whether torch may use dot products of bfloat16 of this CPU; False if torch cannot tell."""
    return _uses_avx512() and bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())  # 2.11 - 2.13


def _uses_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() not in WITHOUT_AVX512


def multiplies_bf16() -> bool:
    """Say whether the CPU has instructions for bf16 matmuls: AVX-512 dot products, or matrix units."""
    return cpu_has_bf16() or cpu_has_amx()
