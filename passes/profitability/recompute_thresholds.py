"""Thresholds for recomputation: when backward should recompute a value instead of saving it (memory for time).

Before: a pass that can recompute it. After: ``recomputing_is_profitable(of_relu, products, elements, False)``.
"""

from __future__ import annotations

# Multiplications per element of the readers from which on one more kernel is negligible: norms and GELUs, and relus.
LEAST_PRODUCTS, LEAST_PRODUCTS_OF_RELU = 256, 64
# Elements below which call overhead outweighs the saved memory: steps of small networks took 1.06 of the time.
FEWEST_COMPUTED_AGAIN = 1 << 18


def recomputing_is_profitable(of_relu: bool, products: float, elements: int, thorough: bool) -> bool:
    """Say whether a value may be computed twice to save its memory.

    ``products``: multiplications per element in its readers. Picoseconds per element, bf16 on CPU with dot products:
    batch norm and relu 450, norms with their cast 720, GELU 600 (tanh 2,400); a multiplication about 60 for the result
    and both gradients. At the thresholds, recomputation takes 4 % of the time of a norm's or GELU's readers, and 12 %
    of the narrowest convolutions. ``thorough`` permits four times as much, and values of any size
    (``benchmarks/recompute_activations.py``).
    """
    if elements < FEWEST_COMPUTED_AGAIN and not thorough:
        return False
    least = LEAST_PRODUCTS_OF_RELU if of_relu else LEAST_PRODUCTS
    return products >= (least / 4 if thorough else least)


# Elements that a GPU writes while Python runs one autograd.Function, about 0.1 ms.
FEWEST_BESIDE_PYTHON = 1 << 24


def fewest_computed_again(device: str, in_step: bool) -> int:
    """Return the fewest elements for which a call that recomputes a value is worth its overhead.

    CUDA: small steps wait for Python. With everything recomputed under ``accuracy=fast``, converted transformers took
    1.15 to 1.25 of the time on an H200 (batches of 8, widths of 384 and 768). The graph of a whole step has no such
    calls: it took 0.92 to 1.06 of the time eagerly, and 0.97 to 1.06 as a CUDA graph.
    """
    return 0 if device == "cpu" or in_step else FEWEST_BESIDE_PYTHON


# Picoseconds of a recomputation: per call, autograd included, and per element. Calls of GELUs took as long as those of
# norms (120 us, on a shared machine); a smaller number is used, which saves memory in wide models.
COMPUTED = {
    "relu": (200_000_000, 450),
    "layer norm": (100_000_000, 720),
    "gelu": (40_000_000, 600),
    "gelu by tanh": (40_000_000, 2_400),
    "silu": (40_000_000, 600),
}
MULTIPLIED = 60  # picoseconds per multiplication of a reader, for its result and both gradients
# The largest share of its readers' time that a recomputed value may take with ``recompute=most``.
MOST_AGAIN = 0.15


def computing_again_is_seen(kind: str, products: float, elements: int) -> bool:
    """Say whether recomputing ``elements`` of ``kind`` takes a large share of the time of their readers.

    CPU, bf16 with dot products. With everything recomputed, steps of the demo's small networks took 1.10 to 1.15 of
    autocast's time. Causes: the ResNet's relus, each read for 19 million multiplications, and GPT-2's tanh GELUs of
    width 96.
    """
    call, element = COMPUTED[kind]
    return call + elements * element > MOST_AGAIN * elements * products * MULTIPLIED
