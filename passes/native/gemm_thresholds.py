"""Thresholds for our matmul kernels (alone, in linears, in LSTMs) and for packed weights.

Before: a pass that can replace linears. After:
``panels_are_profitable("cpu", torch.bfloat16, rows, outputs, inputs)``.
"""

from __future__ import annotations

import torch

from amp_graph.passes.native.jit_compiler import has_openmp, threads_for
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16, multiplies_bf16

# A matmul with fewer outputs runs another kernel, which needs no packed layout.
FEWEST_OUTPUTS = 16


def packing_is_profitable(device: str, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Say whether a linear without gradients is faster with its weight packed in oneDNN's layout.

    Speedups, bf16 on CPU with dot products, weights of 768 to 16,384 outputs: 2.0 to 3.3 for one token, 1.1 to 1.3 for
    16 to 64, 1.05 to 1.15 up to 1,024. Weights of 256 x 256 and 13 x 512, 32 rows: 1.2. One output: 0.6.
    """
    return (
        device == "cpu" and dtype == torch.bfloat16 and outputs >= FEWEST_OUTPUTS and inputs > 1 and multiplies_bf16()
    )


# Multiplications up to which our kernel is faster for a linear over few rows, and elements of its weight. The weight
# may be packed twice: here for few rows, and in another graph for many.
MOST_OF_FEW, MOST_OF_A_WEIGHT = 1 << 25, 1 << 20
# Rows up to which our kernel reads a weight of any size from memory faster than oneDNN; the second with AMX.
MOST_ROWS_OF_ANY, MOST_ROWS_OF_ANY_BY_UNITS = 16, 32
OF_A_PANEL = 64  # fewest outputs per thread


def panels_are_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear over ``rows`` without gradients is faster by our C kernel than by oneDNN.

    Speedups, bf16, weights packed on both sides (``benchmarks/linears.py``):

    * Dot products, one thread: 2.7 to 3.4 up to 32 rows of 64 x 64, 2.5 to 1.4 for 1 to 32 of 256 x 256, 1.6 to 1.1
      for 4 to 32 of 768 x 768, 1.05 from 64 on.
    * Weights larger than the caches, 768 x 3072 to 4096 x 4096 (``--cold``): 1.7 for one row (25 GB/s, oneDNN 14), 2.0
      for 2, 1.3 to 1.5 for 4, 0.9 to 1.1 for 6, 1.3 for 8, 1.1 for 12, 1.0 to 1.1 for 16 and 32.
    * Two OpenMP threads: 1.2 to 2.6 up to 32 rows of 1024 x 1024; from memory 1.1 to 1.3 for 1 to 8 rows, 0.94 to 1.1
      for 6 and 16.
    * AMX: 2.3 to 3.1 up to 64 rows of 64 x 64, 2.0 to 2.8 of 256 x 256, 1.2 to 1.8 of 768 x 768, 1.1 to 1.5 up to 32 of
      768 x 3072; from memory 1.02 to 1.2 up to 32 rows, 0.9 to 1.2 for 64, 0.65 to 1.1 for 256. Two threads give the
      same, but 1.7 for 256 of 512 x 256 (one: 1.1).
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_bf16():
        return False
    of_any = MOST_ROWS_OF_ANY_BY_UNITS if cpu_has_amx() else MOST_ROWS_OF_ANY
    if rows <= of_any and outputs >= OF_A_PANEL * threads_for(outputs * inputs):
        return rows * outputs * inputs > 0
    return 0 < rows * outputs * inputs <= MOST_OF_FEW and outputs * inputs <= MOST_OF_A_WEIGHT


# Multiplications up to which our kernel is faster for a training linear; elements of its weight, whose gradient has
# that many short sums; the narrowest sides that fill the kernel's tiles.
MOST_TRAINED, MOST_OF_A_TRAINED_WEIGHT, NARROWEST = 1 << 23, 1 << 17, 32
MOST_TRAINED_BY_UNITS, MOST_OF_A_TRAINED_WEIGHT_BY_UNITS = 1 << 24, 1 << 19
MOST_TRAINED_BY_UNITS_OF_SEVERAL = 1 << 21  # with AMX on several threads
LEAST_OF_LIBRARY = 1 << 12  # multiplications up to which torch's own loops run a bf16 matmul, and not oneDNN
MOST_OF_A_CALL = 1 << 21  # multiplications up to which call overhead matters, so the kernel with less of it is used


def small_linear_is_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a training linear over ``rows`` is faster by our C kernels, forward and backward.

    bf16 on CPU (``benchmarks/linears.py --training``):

    * Speedups with dot products, one thread, under autograd: 1.6 for 4 to 64 rows of 64 x 64, 1.4 for 256; 1.4 to 1.3
      for 1 to 64 of 256 x 256, 1.1 for 256; 1.2 for 32 of 512 x 256, 0.8 for 32 of 768 x 768. Two threads: the same,
      but 1.5 for 32 and 64 of 256 x 256.
    * Time over oneDNN's matmuls with AMX: 0.3 for 32 of 64 x 64, 0.5 for 32 of 256 x 256, 0.6 to 0.75 up to 256 of
      512 x 512, 0.85 to 1.0 for 2,048 of 256 x 64, 1.0 to 1.3 for 2,048 of 512 x 256.
    * Speedups with AMX, two threads, under autograd: 1.4 to 1.6 for 2 to 256 rows of 64 x 64, 1.5 to 1.3 for 2 to 32 of
      256 x 256, 1.1 to 1.3 for 2 to 16 of 512 x 256, 0.9 for 32.
    * Speedup of 2 and 4 rows of 32 x 32: 0.5. Torch calls no library for them, so nothing pays for a Function.
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_bf16() or rows < 2:
        return False
    most, of_a_weight = MOST_TRAINED, MOST_OF_A_TRAINED_WEIGHT
    if cpu_has_amx():
        most, of_a_weight = MOST_TRAINED_BY_UNITS, MOST_OF_A_TRAINED_WEIGHT_BY_UNITS
        if torch.get_num_threads() > 1:
            most, of_a_weight = MOST_TRAINED_BY_UNITS_OF_SEVERAL, MOST_OF_A_TRAINED_WEIGHT
    fits = min(outputs, inputs) >= NARROWEST and outputs * inputs <= of_a_weight
    return fits and LEAST_OF_LIBRARY < rows * outputs * inputs <= most


# Sizes of matmuls that oneDNN treats as one block, which only one of two threads computes: rows, results and depth.
MOST_OF_A_BLOCK, LEAST_OF_A_BLOCK, LEAST_DEPTH = 1024, 512 * 384, 768


def one_of_two_threads_idles(device: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> bool:
    """Say whether oneDNN runs a matmul on one thread only where our kernel uses two.

    The matmul is ``rows`` x ``depth`` by ``depth`` x ``columns``. bf16 with AMX, oneDNN 3.12: with two threads
    1,024 x 3,072 x 768 takes as long as with one, but 512 x 3,072 x 768 and 1,536 x 3,072 x 768 half as long. For up to
    1,024 rows and columns, with rows >= columns, our kernel takes 0.6 to 0.7 of the time. (For one in five of these
    sizes oneDNN uses both threads, and our kernel takes 1.1 of the time.) Other thread counts were not timed.
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_amx():
        return False
    block = columns <= rows <= MOST_OF_A_BLOCK and rows * columns >= LEAST_OF_A_BLOCK and depth >= LEAST_DEPTH
    return block and torch.get_num_threads() == 2 and has_openmp()


# Multiplications and outputs of a weight gradient from which on our matmul is faster than oneDNN's.
LEAST_LARGE, FEWEST_LARGE = 1 << 15, 16


def amx_product_is_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether ``grad.t() @ x`` is faster by our AMX kernel; grad: [rows, outputs], x: [rows, inputs].

    Time over oneDNN's, bf16 on CPU with AMX, one thread: 0.5 to 0.8 from 8 to 512 rows of 64 x 64 to 3072 x 768, 0.5 to
    0.95 for more rows; with the cast to fp32 on both sides 0.4 to 0.8; 1.0 to 1.15 for 1 or 13 outputs. Two threads
    give the same ratios, with casts and sums a speedup of 1.0 to 1.4 for 32 to 25,088 rows.
    """
    large = outputs >= FEWEST_LARGE and rows * outputs * inputs >= LEAST_LARGE
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_amx() and large


STATES_BY_UNITS = 8  # ratio of an LSTM's state size to its batch from which on our AMX kernel is faster


def lstm_kernel_is_profitable(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether a training LSTM layer is faster by our C kernel, with ``batch`` states of ``size``.

    Speedups over oneDNN, bf16 on CPU, forward and backward, 64 steps (``benchmarks/lstm_backward.py``):

    * Dot products: 1.35 to 1.5 for 32 states of 512, 1.2 to 2.9 for 8 and 16, 1.2 for 64, 1.1 for 128; 1.7 for 32 of
      1,024, 1.1 for 20 of 256, 1.0 for 32 of 128, 1.2 for 4 of 64. Two threads: 1.0 to 2.4.
    * AMX: 1.7 for 32 of 512, 3.2 to 1.2 for 8 to 64, 0.8 for 128; 2.4 for 32 of 1,024, 1.5 for 20 of 256, 0.8 for 32
      of 128, 1.2 for 4 of 64. Two threads: 2.1 for 32 of 512, 2.9 to 1.6 for 8 to 64, 1.1 for 128, 1.0 for 32 of 128.
    """
    known = device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16()
    return known and (not cpu_has_amx() or batch * STATES_BY_UNITS <= size)
