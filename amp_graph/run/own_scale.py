"""The loss scale of ``loss_scaling``, with what this room otherwise imports late: ``conversions`` imports it.

``scale.on(device)`` is the scale; ``scale.unscale(grads)`` says whether a gradient overflowed, and adjusts the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_graph.passes.loss_scaling.unscale import unscale
from amp_graph.scaling.loss_scale import LossScale


class OwnScale:
    """A dynamic loss scale."""

    def __init__(self) -> None:
        """Begin with the scale that GradScaler begins with."""
        self._state = LossScale()
        self.at_lowest = False  # whether the last gradients that overflowed did so at a scale of 1

    def on(self, device: torch.device) -> Tensor:
        """Return the scale on ``device``, 0-d fp32."""
        return self._state.to(device).scale

    def unscale(self, grads: Sequence[Tensor], *, done: bool = False) -> bool:
        """Unscale ``grads`` in place, unless ``done``, and adjust the scale; return whether any is not finite."""
        self.at_lowest = bool(self._state.scale <= 1)
        found_inf = unscale(grads, torch.ones_like(self._state.scale) if done else self._state.scale)
        self._state.update(found_inf)
        return bool(found_inf > 0)

    def inverse(self) -> Tensor:
        """Return 1 / scale."""
        return self._state.inverse()

    def value(self) -> float:
        """Return the scale as a number."""
        return self._state.values()[0]
