"""What float32 products are computed in: TF32 on CUDA, bf16 by oneDNN; private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch

# Both kinds of products of each backend; "rnn" is left out, which no list keeps in full precision alone.
BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}


def fp32_precision(device: str, kind: str) -> str:
    """Return what float32 products run in: "ieee", "tf32" or "bf16"; ``kind``: "matmul" or "conv".

    A setting that is "none" is that of its backend, and then that of all backends; 2.13.
    ``torch.set_float32_matmul_precision`` and ``allow_tf32`` change the same settings.
    """
    backend = BACKENDS.get(device)
    if backend is None:
        return "ieee"
    for place in ((backend, kind), (backend, "all"), ("generic", "all")):
        found = str(torch._C._get_fp32_precision_getter(*place))
        if found != "none":
            return found
    return "ieee"


def kernel_settings() -> tuple[object, ...]:
    """Return the settings by which torch chooses kernels, and that Dynamo's guards do not compare; 2.13.

    They compare TF32 of cuBLAS, its reductions, deterministic algorithms and the number of threads.
    """
    return (
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
        torch._C._get_fp32_precision_getter("mkldnn", "conv"),
    )
