"""A lookup-table activation that is looked up again in backward if nothing saves it.

Before: ``h = gelu_by_table(x); y = linear(h, w)``, which saves ``x`` and ``h``.
After: ``h = tabled_computed_again(x, "gelu"); y = computing_again(linear)(h, w)``, which saves only ``x``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_graph.passes.backends.cpu.pointwise import lookup_table
from amp_graph.passes.memory.recomputable_ops import marked
from amp_graph.passes.memory.recompute_functions import KEY, register_recompute
from amp_graph.passes.registry import Recomputable, declare


def tabled_computed_again(x: Tensor, form: str) -> Tensor:
    """A lookup-table activation whose result can be looked up again."""
    return marked(lookup_table.activated(x, form), (x,))


def _looked_up(node: Any) -> Tensor:
    inputs = node.metadata[KEY].inputs
    (x,) = inputs() if inputs else node.saved_tensors
    return lookup_table.value_of(x, node.form)


register_recompute("_ByTableBackward", _looked_up)
declare(tabled_computed_again, recomputable=Recomputable())
