"""Find views that ``as_strided`` reads over their whole storage: a cast of the view would have another storage.

Before: ``h[:, 2:4].as_strided(size, stride, 5)`` with ``h`` low and the slice cast: the copy starts at the slice.
After: ``h`` is cast and the copy is sliced, so element 5 is that of ``h``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from amp_graph.passes.graph.identify_ops import is_part, only_views
from amp_graph.passes.precision.classify import Classification

BY_STRIDES = frozenset({"aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter"})
WHY = "its reader indexes the whole storage, which a cast of this view alone would not have"


def read_by_strides(classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the views, and views of views, whose storage an ``as_strided`` operation reads."""
    found: set[Node] = set()
    waiting = [node for node, known in classes.items() if BY_STRIDES & set(known.names)]
    while waiting:
        views = [n for n in waiting.pop().all_input_nodes if n not in found and (only_views(n) or is_part(n))]
        found.update(views)
        waiting.extend(views)
    return frozenset(found)
