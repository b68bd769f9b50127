"""Trainers that people use: Lightning, transformers' Trainer, accelerate.

Each file is for one package and imports it; without the package its import raises one error that names what to install.
Imports everything below; nothing imports from here.
"""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import OptState


def missing(error: ModuleNotFoundError, package: str, needed_by: str) -> ModuleNotFoundError:
    """Return the error to raise for ``error``; ``error`` itself if ``package`` is there and something else is not."""
    if error.name is None or error.name.partition(".")[0] != package.replace("-", "_"):
        return error
    return ModuleNotFoundError(
        f"{needed_by} needs the package {package}, which is not installed\n"
        f"  fix:   pip install {package}, or pip install 'amp-graph[integrations]'",
        name=error.name,
    )


def unscale_once(scaler: Any, optimizer: Any) -> None:
    """Unscale the gradients of ``optimizer``, unless that was done in this step: a clip of the user's may have."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
