"""CPU instruction sets: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import functools

import torch

# Where torch uses no AVX-512: another CPU, or ATEN_CPU_CAPABILITY in the environment, which binds our kernels as well.
WITHOUT_AVX512 = ("DEFAULT", "AVX2")


def cpu_has_amx() -> bool:
    """Say whether this CPU has matrix units for bfloat16 that torch may use; False if torch cannot tell."""
    return _may_use_avx512() and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # 2.11 - 2.13


def cpu_has_bf16() -> bool:
    """Say whether this CPU computes dot products of bfloat16 that torch may use; False if torch cannot tell."""
    return _may_use_avx512() and bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())  # 2.11 - 2.13


def _may_use_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() not in WITHOUT_AVX512 and onednn_takes_bf16()


@functools.cache  # ONEDNN_MAX_CPU_ISA, which may forbid it, is read once in a process
def onednn_takes_bf16() -> bool:
    """Say whether oneDNN has bf16 kernels for this CPU: its LSTM and its packing of weights raise an error elsewhere.

    True without oneDNN, which then is not asked for either.
    """
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # 2.11 - 2.13
    return asked is None or bool(asked())


def multiplies_bf16() -> bool:
    """Say whether the CPU has instructions for bf16 matmuls: AVX-512 dot products, or matrix units."""
    return cpu_has_bf16() or cpu_has_amx()
