"""What a call of a model may write, as it was before the call: to run the call once more where it failed half way.

Before: ``before = BeforeCall(model, args)``, then a call that raises. After ``before.restore()``: buffers and random
state as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.passes.read_modules import is_uninitialized


class BeforeCall:
    """The version counters of a call's inputs and parameters, and the values of buffers and of random state."""

    def __init__(self, model: torch.nn.Module, given: Any) -> None:
        """Read them."""
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        counted = [t for t in (*leaves, *model.parameters()) if not t.is_inference()]
        self._versions = [(t, t._version) for t in counted]
        plain = [b for b in model.buffers() if not is_uninitialized(b) and b.layout is torch.strided]
        self._buffers = [(b, b.detach().clone()) for b in plain]
        self._random = torch.get_rng_state()
        self._random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def is_written(self) -> bool:
        """Say whether the call wrote to an input or a parameter, which ``restore`` does not take back."""
        return any(t._version != version for t, version in self._versions)

    def restore(self) -> None:
        """Take back what the call wrote to buffers and drew of random numbers."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):  # a batch norm's version counters do not show it
                    buffer.copy_(value)
        torch.set_rng_state(self._random)
        if self._random_cuda:
            torch.cuda.set_rng_state_all(self._random_cuda)
