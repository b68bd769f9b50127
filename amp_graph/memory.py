"""Controls the memory that amp_graph holds: ``drop_weight_copies(model)`` frees what is kept between calls."""

from __future__ import annotations

import torch

from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError
from amp_graph.passes.memory.compiled_embedding_gradients import POOL

__all__ = ["drop_weight_copies"]


def drop_weight_copies(model: torch.nn.Module) -> int:
    """Empty the weight cache of a converted ``model``; the next call casts the weights again.

    model: a converted one. Returns the number of freed bytes.

    Call it to free the memory of the low-precision copies, of recorded graphs (``replay=true``), and the buffers for
    embedding gradients. Call it after a write that Python cannot see, by a C extension that holds a
    parameter's address. And call it once nobody writes any longer through an address that ``data_ptr()`` returned:
    until then the parameter is cast at each call. Raises CaptureError if ``model`` is not converted.
    """
    found = conversion_of(model)
    if found is None:
        raise CaptureError("drop_weight_copies: the model is not converted\n  fix:   amp_graph.convert(model)")
    recorded = found.captured.replays.drop() if found.captured.replays is not None else 0
    if found.copies is not None:
        return recorded + found.copies.drop(model.parameters())
    return recorded + (POOL.drop() if found.compile == "inductor" else 0)
