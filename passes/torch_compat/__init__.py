"""Torch names and behavior that are private or differ between versions, one file per subject.

Each name states the versions it was checked on, so that a new torch release affects only this folder. Everything may
import from here; nothing here imports another room.

Supported are torch 2.13 and the two versions before it; newer ones run too. A shim says which version needs it.
"""

from __future__ import annotations

import torch


def torch_version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def keeps_lstm_workspaces() -> bool:
    """Say whether the workspace of oneDNN's LSTM survives a compiler: in 2.11 gradients were garbage.

    Goes with torch 2.12.
    """
    return torch_version() >= (2, 13)
