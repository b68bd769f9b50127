"""When a value that backward reads is better computed again than kept: time for memory.

Before: a pass that knows how to compute it again. After: ``recomputing_is_profitable(of_relu, products, elements,
False)``.
"""

from __future__ import annotations

# Products an element read below which a kernel more is seen: of a norm or GELU, and of a batch norm's relu.
LEAST_PRODUCTS, LEAST_PRODUCTS_OF_RELU = 256, 64
# Elements below which what a call costs is seen, more than memory: steps of small networks took 1.06 of the time.
FEWEST_COMPUTED_AGAIN = 1 << 18


def recomputing_is_profitable(of_relu: bool, products: float, elements: int, thorough: bool) -> bool:
    """Say whether what is read for ``products`` multiplications an element may be computed twice, to save its memory.

    bf16 on CPU with dot products, picoseconds an element: batch norm and relu 450, norms with their cast 720, GELU 600
    (by tanh 2,400); a product takes about 60 for its result and both gradients. At the least products that is 4 % of
    what reads a norm or GELU, and 12 % of the narrowest convolutions; ``thorough`` puts up with four times as much, and
    with values of any size (``benchmarks/recompute_activations.py``).
    """
    if elements < FEWEST_COMPUTED_AGAIN and not thorough:
        return False
    least = LEAST_PRODUCTS_OF_RELU if of_relu else LEAST_PRODUCTS
    return products >= (least / 4 if thorough else least)


# Elements that a GPU writes in the time in which Python runs a function with a backward of its own, some 0.1 ms.
FEWEST_BESIDE_PYTHON = 1 << 24


def fewest_computed_again(device: str, in_step: bool) -> int:
    """Return how many elements a value has at least that is worth a call of ours which computes it again.

    CUDA, where Python is what small steps wait for: with all that ``accuracy=fast`` computes again converted
    transformers took 1.15 to 1.25 of the time on an H200 (batches of 8, widths of 384 and 768). In the graph of a whole
    step there are no such calls: it took 0.92 to 1.06 as it is, and 0.97 to 1.06 replayed.
    """
    return 0 if device == "cpu" or in_step else FEWEST_BESIDE_PYTHON


# Picoseconds of what is computed again: a call, with what is asked of autograd, and an element. The calls of GELUs
# took as long as those of norms (120 us, on a shared machine): less is said of them, for memory's sake in wide models.
COMPUTED = {
    "relu": (200_000_000, 450),
    "layer norm": (100_000_000, 720),
    "gelu": (40_000_000, 600),
    "gelu by tanh": (40_000_000, 2_400),
    "silu": (40_000_000, 600),
    "looked up": (40_000_000, 300),
}
MULTIPLIED = 60  # a multiplication of a reader, for its result and both gradients
# Part of the readers' time that a value computed again may take with ``recompute=most``.
MOST_AGAIN = 0.15


def computing_again_is_seen(kind: str, products: float, elements: int) -> bool:
    """Say whether computing ``elements`` of ``kind`` twice takes a large part of what reads them.

    CPU, bf16 with dot products. With all computed again steps of the demo's small networks took 1.10 to 1.15 of
    autocast's: the ResNet's relus, each read for 19 million multiplications, and GPT-2's tanh GELUs of width 96.
    """
    call, element = COMPUTED[kind]
    return call + elements * element > MOST_AGAIN * elements * products * MULTIPLIED
