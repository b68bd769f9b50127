"""Controls the memory that amp_graph and the C library hold: freeing it, or keeping more of it for speed.

``drop_weight_copies(model)`` frees what a converted model keeps between calls. ``keep_heap()`` lets converted models
keep the memory that a step frees for the next step. ``raise_malloc_thresholds()`` makes glibc reuse the memory that
any tensor frees, in the whole process. The last two cost memory and are opt-in.
"""

from __future__ import annotations

import torch

from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError
from amp_graph.malloc_thresholds import raise_malloc_thresholds as raise_malloc_thresholds
from amp_graph.passes.memory.compiled_embedding_gradients import POOL
from amp_graph.passes.memory.heap_retention import HEAP, glibc

__all__ = ["drop_weight_copies", "keep_heap", "raise_malloc_thresholds"]


def drop_weight_copies(model: torch.nn.Module) -> int:
    """Empty the weight cache of a converted ``model``; the next call casts the weights again.

    model: a converted one. Returns the number of freed bytes.

    Call it to free the memory of the low-precision copies, of recorded graphs (``replay=true``), and the buffers for
    embedding gradients and large results. Call it after a write that Python cannot see, by a C extension that holds a
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


def keep_heap(on: bool = True) -> bool:
    """Make graphs captured from now on keep the memory that a step or a call frees, for the next one.

    It acts on the CPU, with glibc, in the main thread: without it glibc may return the top of its heap to the system
    after each step, and the next step gets new pages. It costs resident memory between steps: up to three times a
    step's peak stays reserved, and all that steps have written to stays resident. Steps with large, short-lived
    tensors gain most, such as the logits of a language model (docs/internals/memory.md). Results are bit-identical.

    The policy word ``keep_memory=true`` does the same for one model; ``keep_memory=false`` excludes a model. A model's
    memory returns to the system once the model is reverted or deleted. ``on=False`` affects graphs captured
    afterwards. Returns False if the C library is not glibc: others keep memory anyway. For torch.autocast and
    unconverted models use ``raise_malloc_thresholds``.
    """
    HEAP.by_default = bool(on)
    return glibc() is not None
