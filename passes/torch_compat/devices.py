"""Instruction sets, streams, settings of products, and kernels of oneDNN: what only one device has.

Each name states the versions of torch that it was checked on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from amp_graph.passes.torch_compat.dispatch import dispatched

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


def stream_of(tensor: torch.Tensor) -> int | None:
    """Return the current stream for work on ``tensor``, 0 without streams; None while a CUDA graph is recorded."""
    if tensor.device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


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


# Their stubs leave out some of these settings.
_CUDNN: Any = torch.backends.cudnn
_ONEDNN: Any = torch.backends.mkldnn


def kernel_settings() -> tuple[object, ...]:
    """Return the settings by which torch chooses kernels, and that Dynamo's guards do not compare; 2.13.

    They compare TF32 of cuBLAS, its reductions, deterministic algorithms and the number of threads.
    """
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return (
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        _CUDNN.conv.fp32_precision,
        _ONEDNN.matmul.fp32_precision,
        _ONEDNN.conv.fp32_precision,
    )


ONEDNN_RNN = "aten.mkldnn_rnn_layer"  # what an LSTM in fp32 is made of on the CPU; 2.11 - 2.13


def pack_linear_weight(weight: torch.Tensor) -> Any:
    """Return ``weight`` [outputs, inputs] in the layout of oneDNN's matmuls, which only they can read; 2.11 - 2.13."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


# Called as (x, weight, bias, "none" or a fused activation, [], its form); 2.11 - 2.13. A "relu" turns NaN into 0.
linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_linear_pointwise = dispatched(linear_pointwise) if linear_pointwise is not None else None


def linear_of_packed_weight(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, after: str = "none", form: str = ""
) -> Any:
    """Return ``F.linear(x, weight, bias)`` for a packed ``weight``, with oneDNN's fused ``after``; 2.11 - 2.13.

    after: "none", "relu", which turns NaN into 0, "swish" or "gelu", the last in the ``form`` "none" or "tanh".
    """
    assert _linear_pointwise is not None, "nothing is packed without oneDNN"
    return _linear_pointwise(x, packed, bias, after, [], form)


def pack_convolution_weight(weight: torch.Tensor, shape: Any, images: torch.Size) -> Any:
    """Return a 2d convolution's ``weight`` in oneDNN's best layout for ``images`` of that size; 2.11 - 2.13."""
    pack: Any = torch.ops.aten.mkldnn_reorder_conv2d_weight
    where = (shape.padding, shape.stride, shape.dilation, shape.groups)
    return pack(weight.to_mkldnn(), *where, list(images))


_convolution_pointwise = torch.ops.mkldnn._convolution_pointwise if torch.backends.mkldnn.is_available() else None
_convolution_into = torch.ops.mkldnn._convolution_pointwise_.binary if _convolution_pointwise is not None else None


def convolution_pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    shape: Any,
    other: torch.Tensor | None,
    into: bool = False,
    activation: str = "none",
) -> Any:
    """Return ``conv2d(x, weight, bias)``, plus ``other``, with ``activation``; 2.11 - 2.13.

    x, other: bf16, channels_last; weight: packed; bias: fp32, but bf16 with ``other``, as that kernel requires.
    ``into``: write the result over ``other``, with the same bits. activation: applied to the kernel's fp32 sums:
    "none", "relu", which turns NaN into 0, or, without ``other``, "swish" or "hardswish".
    """
    assert _convolution_pointwise is not None, "nothing is folded without oneDNN"
    assert _convolution_into is not None, "nothing is folded without oneDNN"
    where = (shape.padding, shape.stride, shape.dilation, shape.groups)
    if other is None:
        return dispatched(_convolution_pointwise.default)(x, weight, bias, *where, activation, [], "")
    after: tuple[Any, ...] = ("add", 1.0, None if activation == "none" else activation, [], None)
    kernel, given = (_convolution_into, (other, x)) if into else (_convolution_pointwise.binary, (x, other))
    return dispatched(kernel)(*given, weight, bias, *where, *after)
