"""Keeps more memory of the C library, for speed.

``keep_heap()`` lets converted models keep the memory that a step frees for the next step. ``raise_malloc_thresholds()``
makes glibc reuse the memory that any tensor frees, in the whole process. Both cost memory and are opt-in.
"""

from __future__ import annotations

from amp_graph.malloc_thresholds import raise_malloc_thresholds as raise_malloc_thresholds
from amp_graph.passes.memory.heap_retention import HEAP, glibc

__all__ = ["keep_heap", "raise_malloc_thresholds"]


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
