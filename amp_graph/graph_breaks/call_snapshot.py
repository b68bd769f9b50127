"""The state that a call of a training may write, so that a call that failed half way can run again.

It copies inputs and buffers; parameters are only watched. ``amp_graph.model_state`` restores a whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.model_state import RandomState
from amp_graph.passes.torch_compat.module_attributes import is_uninitialized


class BeforeCall:
    """The version counters of a call's inputs and parameters, and the values of inputs, buffers and random state."""

    def __init__(self, model: torch.nn.Module, given: Any) -> None:
        """Take the snapshot."""
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        counted = [t for t in (*leaves, *model.parameters()) if not t.is_inference()]
        self._versions = [(t, t._version) for t in counted]
        held = [t for t in leaves if type(t) is Tensor and t.is_leaf and t.layout is torch.strided]
        self._inputs = {id(t): t.detach().clone() for t in held if not t.is_inference()}
        plain = [b for b in model.buffers() if not is_uninitialized(b) and b.layout is torch.strided]
        self._buffers = [(b, b.detach().clone()) for b in plain]
        self._random = RandomState()

    def is_lost(self) -> bool:
        """Return whether the call wrote what ``restore`` cannot undo: a parameter, or an input with autograd history.

        Such an input is the result of other code, and the write has replaced its history.
        """
        return any(id(t) not in self._inputs or (t._is_view() and not t.is_leaf) for t in self._written())

    def _written(self) -> list[Tensor]:
        return [t for t, version in self._versions if t._version != version]

    def restore(self) -> None:
        """Undo the call's writes to inputs and buffers, and its use of random numbers."""
        with torch.no_grad():
            for t in self._written():
                (t if t.is_leaf else t.detach_()).copy_(self._inputs[id(t)])
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):  # a batch norm's version counters do not show it
                    buffer.copy_(value)
        self._random.restore()
