"""Thresholds of size: below them a Python call of ours (20 to 200 us with its backward) takes longer than it saves.

Before: a pass that replaces an operation of any size. After: ``if sharing_a_cast_is_profitable("cpu", elements): ...``.
All figures: bf16 on a CPU with dot products, one thread, microseconds or ratios of forward and backward
(``benchmarks/host_time.py`` has whole models).
"""

from __future__ import annotations

from amp_graph.passes.profitability.gemm_thresholds import LEAST_OF_LIBRARY
from amp_graph.passes.torch_compat.cpu import cpu_has_amx

# Elements of a weight below which one more cast takes no longer than the check whether its copy is current.
FEWEST_KEPT = 1 << 15
# Multiplications up to which a linear without gradients is torch's own loop, and its casts are no longer than a check.
MOST_CAST = LEAST_OF_LIBRARY


def keeping_a_copy_is_profitable(elements: int, trained: bool, products: int | None = None) -> bool:
    """Say whether a low-precision copy of a weight of so many ``elements`` should outlive the call.

    Reading a copy takes this much longer than a cast: with an update before each call 7 us up to 16,384 elements, 9 at
    32,768; -23 at 131,072 with four calls per update; without any update 0 to 4 up to 4,096, -3 to 1 at 16,384, -6 at
    32,768. Without gradients (``trained``) nothing has to lead back to the weight, and copies are packed: profitable
    but for linears of so few multiplications (``products``, None if others read it) that torch calls no library. 4 rows
    of 32 x 32: the call of our kernel and two checks take 14 us, torch's linear and its casts 9.
    """
    if not trained:
        return products is None or products > MOST_CAST
    return elements >= FEWEST_KEPT


# Elements of a value below which one cast per reader is faster than one that all readers share.
FEWEST_SHARED = 1 << 15


def sharing_a_cast_is_profitable(device: str, eager: bool, elements: int) -> bool:
    """Say whether several readers of a value of so many ``elements`` should share its cast, by a Python function.

    Its gradients are the same as with one cast per reader, which are C++ in torch. Time of the function over that of
    the casts, two and three readers: 1.2 to 1.4 up to 4,096 elements, 1.2 at 16,384, 1.15 at 32,768, 1.0 to 1.05 at
    131,072, 0.5 to 0.6 at 262,144. Each cast saves its result for backward, so the limit is lower than that of time. A
    compiler traces through the function. On CUDA each cast is a kernel; not timed.
    """
    return device != "cpu" or not eager or elements >= FEWEST_SHARED


MOST_SCORES_OF_TORCH = 512  # scores of all heads


def torchs_trained_attention_is_profitable(heads: int, queries: int, keys: int, width: int) -> bool:
    """Say whether torch's kernel is faster than ours, forward and backward, for so few ``heads`` of the whole batch.

    Our time over torch's: 1.8 for 8 and 16 scores of width 16, 1.55 for 256, 1.3 for 512; 0.5 for 1,024 and 0.4 for
    2,048 of width 64, whose products are so large that torch calls oneDNN for each.
    """
    return heads * queries * keys <= MOST_SCORES_OF_TORCH and queries * keys * width <= LEAST_OF_LIBRARY


# Multiplications of a recurrent layer, all steps; the second with AMX, whose figures are in gemm_thresholds.py.
LEAST_RECURRENT, LEAST_RECURRENT_BY_UNITS = 1 << 25, 1 << 23


def recurrent_function_is_profitable(products: int) -> bool:
    """Say whether a trained LSTM layer of so many multiplications outweighs the calls of our function.

    Its time over torch's: 1.4 up to 262,144 multiplications, 1.3 to 1.15 from 2 to 17 million, 1.1 at 34 million, 1.1
    and 0.9 at 67 million (states of 128, 256).
    """
    return products >= (LEAST_RECURRENT_BY_UNITS if cpu_has_amx() else LEAST_RECURRENT)


MOST_BEHIND_RECURRENCE = 1 << 15  # multiplications


def small_linear_behind_recurrence_is_profitable(products: int) -> bool:
    """Say whether a trained linear in a graph with a recurrent layer outweighs the calls of our function.

    A step with an LSTM of 32 states and a linear of 32 x 64, over ``torch.autocast``'s: 1.05 by our function for 4 and
    for 16 rows, 0.995 by torch's linear. The function's forward takes 45 to 65 us longer there, its backward 15 less;
    in a graph of linears alone it takes 0.8 to 0.95 of torch's time.
    """
    return products > MOST_BEHIND_RECURRENCE
