"""The memory that amp_graph and the C library hold: what gives it back, and what makes them keep more for speed.

``drop_weight_copies(model)`` gives back what a converted model keeps between calls. ``keep_heap()`` lets converted
models keep the memory that a step frees for the next step; ``raise_malloc_thresholds()`` makes glibc reuse what any
tensor frees, for the whole process. Both cost memory and are never done for you.
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


def keep_heap(on: bool = True) -> bool:
    """Let graphs that are captured from now on keep the memory that a step or a call frees for the next one.

    For the CPU, glibc and the main thread: without it glibc may give the end of its heap back to the system after each
    step, and the next step gets it as new pages. It costs resident memory between steps: up to three times what a step
    has alive at once stays reserved, and what steps have written to stays resident. Steps of many large, short-lived
    tensors gain most; those of transformers often nothing (docs/memory.md). Results are the same bit for bit.

    It is what the policy word ``keep_memory=true`` does for one model, and ``keep_memory=false`` excepts a model from
    it. The memory of a model goes back to the system once the model is reverted or gone. ``on=False`` is for graphs
    captured afterwards. Returns False where the C library is not glibc: others keep memory by themselves. ``torch``
    under autocast, and whatever is not converted, gains by ``raise_malloc_thresholds`` instead.
    """
    HEAP.by_default = bool(on)
    return glibc() is not None
