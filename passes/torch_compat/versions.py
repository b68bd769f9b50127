"""The running version of torch, and what depends only on it.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import torch


def torch_version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def keeps_lstm_workspaces() -> bool:
    """Say whether the workspace of oneDNN's LSTM survives a compiler: in 2.11 gradients were garbage."""
    return torch_version() >= (2, 13)


def takes_kernels_of_ours() -> bool:
    """Say whether Inductor's code generation is what ``small_gemm_template.py`` expects: checked on 2.13."""
    return torch_version() >= (2, 13)
