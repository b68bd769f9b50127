"""The loss scale of ``loss_scaling``, with what this room otherwise imports late: ``conversions`` imports it.

``scale.on(device)`` is the scale; ``scale.unscale(grads)`` says whether a gradient overflowed, and adjusts the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_graph.passes.loss_scaling.scale_loss import unscale
from amp_graph.scaling.loss_scale import LossScale

MOST_DOUBLINGS = 12  # the first scale is at least 16: gradients that overflow at 1 end the scaling


class OwnScale:
    """A dynamic loss scale."""

    def __init__(self, loss: float = 1.0) -> None:
        """Begin with GradScaler's first scale, 2^16, for a ``loss`` around 1, and with less for a sum over a batch.

        2^16 suits a mean: a sum of 10^5 would skip a step for each factor of 2 between them.
        """
        doublings = math.frexp(loss)[1] - 1 if 1 < loss < math.inf else 0
        self._state = LossScale(2.0 ** (16 - min(doublings, MOST_DOUBLINGS)))
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
