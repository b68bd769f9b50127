"""Which version of torch runs, and what depends on nothing but that.

Each with the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch


def torch_version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def keeps_lstm_workspaces() -> bool:
    """Say whether what oneDNN's LSTM leaves for its backward survives a compiler: in 2.11 gradients were garbage."""
    return torch_version() >= (2, 13)


def takes_kernels_of_ours() -> bool:
    """Say whether Inductor's code generation is as ``small_gemm_template.py`` goes by: 2.13 was tried."""
    return torch_version() >= (2, 13)
