"""The memory that amp_graph and the C library hold: what gives it back, and what makes them keep more for speed.

``drop_weight_copies(model)`` gives back what a converted model keeps between calls. ``raise_malloc_thresholds()``
makes glibc reuse what any tensor frees, for the whole process. Neither is ever done for you.
"""

from __future__ import annotations

import torch

from amp_graph.conversion import conversion_of
from amp_graph.errors import CaptureError
from amp_graph.malloc_thresholds import raise_malloc_thresholds as raise_malloc_thresholds
from amp_graph.passes.table_gradient import POOL

__all__ = ["drop_weight_copies", "raise_malloc_thresholds"]


def drop_weight_copies(model: torch.nn.Module) -> int:
    """Forget the low-precision copies of the weights of a converted ``model``; the next call makes them anew.

    Three reasons to call it. To free the memory of the copies, with that kept for gradients of tables and for large
    results. After a write that Python cannot see, by a C extension that holds a parameter's address. And to say that
    nobody writes any longer to an address that ``data_ptr()`` gave out: until then the parameter is cast at each call.
    Returns how many bytes all that had. Raises CaptureError if ``model`` is not converted.
    """
    found = conversion_of(model)
    if found is None:
        raise CaptureError("drop_weight_copies: the model is not converted\n  fix:   amp_graph.convert(model)")
    if found.copies is not None:
        return found.copies.drop(model.parameters())
    return POOL.drop() if found.compile == "inductor" else 0
