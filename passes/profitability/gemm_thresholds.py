"""When products by our own kernels pay, alone, in linears and in LSTMs, and when weights that are laid out for them.

Before: a pass that knows how to multiply. After: ``panels_are_profitable("cpu", torch.bfloat16, rows, outputs,
inputs)``.
"""

from __future__ import annotations

import torch

from amp_graph.passes.native.jit_compiler import has_openmp, threads_for
from amp_graph.passes.profitability.thresholds import LEAST_MAPPED
from amp_graph.passes.torch_compat.cpu import cpu_has_amx, cpu_has_bf16, multiplies_bf16


def own_product_is_profitable(device: str, rows: int, width: int) -> bool:
    """Say whether ``x @ x.mT`` of ``x`` [..., rows, width] should have one product for its gradient, of ``g + g.mT``.

    bf16 on CPU with AMX, forward and backward with the sum of the two: 2.4 times as fast for 2,048 of 9 x 64, 1.3 for
    2,048 of 27 x 64 and for one of 128 x 512, 1.1 for 256 of 64 x 64; 0.9 for 64 of 128 x 64, 0.4 for one of
    1,024 x 128, where what is turned and added is larger than the operands.
    """
    return device == "cpu" and 1 < rows <= width


def _shares_threads() -> bool:
    """Say whether our products run on as many threads as oneDNN's."""
    return torch.get_num_threads() == 1 or has_openmp()


# A product with fewer outputs runs another kernel, which wants no layout of its own.
FEWEST_OUTPUTS = 16


def packing_is_profitable(device: str, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Say whether a linear without gradients is faster on a weight that lies as oneDNN multiplies it.

    bf16 on CPU with dot products, weights of 768 to 16,384 outputs: 2.0 to 3.3 times as fast for one token, 1.1 to 1.3
    for 16 to 64, 1.05 to 1.15 up to 1,024; of 256 x 256 and 13 x 512 at 32 rows 1.2. One output takes 0.6 of the speed.
    """
    return (
        device == "cpu" and dtype == torch.bfloat16 and outputs >= FEWEST_OUTPUTS and inputs > 1 and multiplies_bf16()
    )


def outputs_at_once(rows: int, outputs: int) -> int:
    """Return how many outputs of a linear are best made at once where all are then widened; ``outputs`` for all.

    bf16 of 2 MiB stay in cache: 512 rows of 30,522 outputs for 768 inputs took 22.7 ms in 16 parts, 30.7 as a whole,
    1,024 rows of 32,000 55 and 58. Parts of fewer outputs than 1,024 were not timed.
    """
    return min(outputs, max(1024, (1 << 20) // max(1, rows) // 64 * 64))


# Multiplications up to which a linear over few rows is faster by our kernel, and elements of its weight, which may lie
# twice: for few rows here, and for many in another graph.
MOST_OF_FEW, MOST_OF_A_WEIGHT = 1 << 25, 1 << 20
MOST_OF_FEW_BY_ONE, MOST_OF_A_WEIGHT_BY_ONE = 1 << 21, 1 << 18  # where oneDNN spreads it on threads, and we do not
# Over which a weight of any size is read from memory faster than oneDNN does; and with matrix units.
MOST_ROWS_OF_ANY, MOST_ROWS_OF_ANY_BY_UNITS = 16, 32
OF_A_PANEL = 64  # outputs: a thread has at least so many


def panels_are_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear of ``rows`` without gradients is faster in compiled C of ours than in oneDNN's call.

    bf16 on CPU with dot products, one thread, weights packed on both sides (``benchmarks/linears.py``): 2.7 to 3.4
    times as fast up to 32 rows of 64 x 64, 2.5 to 1.4 times for 1 to 32 of 256 x 256, 1.6 to 1.1 for 4 to 32 of
    768 x 768, 1.05 from 64 on. Weights that no cache holds, 768 x 3072 to 4096 x 4096: 1.7 times for one row (25 GB/s,
    oneDNN 14), 2.0 for 2, 1.3 to 1.5 for 4, 0.9 to 1.1 for 6, 1.3 for 8, 1.1 for 12 and 1.0 to 1.1 for 16 and 32
    (``--cold``). With two of OpenMP's threads on both sides 1.2 to 2.6 times up to 32 rows of 1024 x 1024, 1.1 to 1.3
    from memory for 1 to 8 rows, 0.94 to 1.1 for 6 and 16. With AMX 2.3 to 3.1 times up to 64 rows of 64 x 64, 2.0 to
    2.8 of 256 x 256, 1.2 to 1.8 of 768 x 768, 1.1 to 1.5 up to 32 of 768 x 3072; from memory 1.02 to 1.2 up to 32 of
    any, 0.9 to 1.2 for 64, 0.65 to 1.1 for 256; with two threads the same, 1.7 for 256 of 512 x 256 (one: 1.1).
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_bf16():
        return False
    most, of_a_weight = MOST_OF_FEW, MOST_OF_A_WEIGHT
    of_any = MOST_ROWS_OF_ANY_BY_UNITS if cpu_has_amx() else MOST_ROWS_OF_ANY
    if not _shares_threads():
        most, of_a_weight = MOST_OF_FEW_BY_ONE, MOST_OF_A_WEIGHT_BY_ONE
    elif rows <= of_any and outputs >= OF_A_PANEL * threads_for(outputs * inputs):
        return rows * outputs * inputs > 0
    return 0 < rows * outputs * inputs <= most and outputs * inputs <= of_a_weight


# Multiplications up to which a linear that trains is faster by our kernel, and where oneDNN alone has threads;
# elements of its weight, whose gradient has as many short sums; and the narrowest sides that fill the kernel's tiles.
MOST_TRAINED, MOST_TRAINED_BY_ONE, MOST_OF_A_TRAINED_WEIGHT, NARROWEST = 1 << 23, 1 << 20, 1 << 17, 32
MOST_TRAINED_BY_UNITS, MOST_OF_A_TRAINED_WEIGHT_BY_UNITS = 1 << 24, 1 << 19
MOST_TRAINED_BY_UNITS_OF_SEVERAL = 1 << 21  # where several threads have them
MOST_OF_A_CALL = 1 << 21  # multiplications up to which what a call does beside them counts: the shorter kernel's


def small_linear_is_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear of ``rows`` that trains is faster in compiled C of ours, forward and backward.

    bf16 on CPU with dot products, one thread, under autograd (``benchmarks/linears.py --training``): 1.6 times as fast
    for 4 to 64 rows of 64 x 64, 1.4 for 256; 1.4 to 1.3 times for 1 to 64 of 256 x 256, 1.1 for 256; 1.2 for 32 of
    512 x 256, 0.8 for 32 of 768 x 768. With two threads the same, 1.5 for 32 and 64 of 256 x 256. With AMX, of oneDNN's
    products' time: 0.3 for 32 of 64 x 64, 0.5 for 32 of 256 x 256, 0.6 to 0.75 up to 256 of 512 x 512, 0.85 to 1.0 for
    2,048 of 256 x 64, 1.0 to 1.3 for 2,048 of 512 x 256. Two threads with AMX, under autograd: 1.4 to 1.6 times as fast
    for 2 to 256 rows of 64 x 64, 1.5 to 1.3 for 2 to 32 of 256 x 256, 1.1 to 1.3 for 2 to 16 of 512 x 256, 0.9 for 32.
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_bf16() or rows < 2:
        return False
    most, of_a_weight = MOST_TRAINED, MOST_OF_A_TRAINED_WEIGHT
    if cpu_has_amx():
        most, of_a_weight = MOST_TRAINED_BY_UNITS, MOST_OF_A_TRAINED_WEIGHT_BY_UNITS
        if torch.get_num_threads() > 1:
            most, of_a_weight = MOST_TRAINED_BY_UNITS_OF_SEVERAL, MOST_OF_A_TRAINED_WEIGHT
    if not _shares_threads():
        most = MOST_TRAINED_BY_ONE
    fits = min(outputs, inputs) >= NARROWEST and outputs * inputs <= of_a_weight
    return fits and rows * outputs * inputs <= most


def bias_in_product_is_profitable(device: str, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Say whether a product's kernel should add the bias itself, instead of to a result that starts as the bias.

    bf16 on CPU with dot products, weights as they lie: 1.08 times as fast for 512 rows of 768 x 3072, 1.10 for 788 of
    384 x 1536, 1.3 for 32 of 256 x 256; 1.00 to 1.03 for 1,024 rows of 13 x 512 and 512 x 256.
    """
    return packing_is_profitable(device, dtype, outputs, inputs)


# Elements of a linear's result from which on copying the bias there takes longer than a function of our own is called.
LEAST_BIASED = 1 << 18


def bias_in_trained_linear_is_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear that trains under autograd should give its bias to the product.

    bf16 on CPU with dot products: a step of BERT took 0.97, of a ViT 0.98 of the time, of GPT and a DLRM 0.99. A result
    that is mapped anew is paged in faster by the copy than by the product: 2,048 of 512 x 8192 took 1.1 times as long.
    """
    fits = LEAST_BIASED <= rows * outputs < LEAST_MAPPED // dtype.itemsize
    return fits and bias_in_product_is_profitable(device, dtype, outputs, inputs)


# Multiplications from which on the call of a function with a backward of its own is not seen, with matrix units.
LEAST_BY_FUNCTION = 220_000_000


def training_by_function_is_profitable(rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear that trains under autograd is so large that a function of Python around it is not seen.

    bf16 with AMX, casts of weight and bias included: ours takes some 0.1 ms more, in caches that others have filled. Of
    torch's speed 0.7 to 0.8 up to 40 million multiplications, 0.8 to 0.95 at 75 to 226 million, 1.0 to 1.15 from 268
    million on, with one thread and with two. A ViT of 384, whose projections take 231 million, trains by it in 0.99 of
    the time, with two threads in 1.00, and casts 12 gradients less. With dot products a multiplication takes six times
    as long.
    """
    return not cpu_has_amx() or rows * outputs * inputs >= LEAST_BY_FUNCTION


# Rows, results and depth of products of which oneDNN makes one block, which one of two threads multiplies.
MOST_OF_A_BLOCK, LEAST_OF_A_BLOCK, LEAST_DEPTH = 1024, 512 * 384, 768


def one_of_two_threads_idles(device: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> bool:
    """Say whether one thread of oneDNN's multiplies ``rows`` x ``depth`` by ``depth`` x ``columns``, and two of ours.

    bf16 with AMX, oneDNN 3.12: with two threads 1,024 x 3,072 x 768 takes as long as with one, and 512 x 3,072 x 768 or
    1,536 x 3,072 x 768 half as long. Ours takes 0.6 to 0.7 of the time up to 1,024 rows and columns, of as many rows as
    columns or more (one in five of these sizes is spread by oneDNN, and takes 1.1 of it). Other numbers of threads were
    not timed.
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_amx():
        return False
    block = columns <= rows <= MOST_OF_A_BLOCK and rows * columns >= LEAST_OF_A_BLOCK and depth >= LEAST_DEPTH
    return block and torch.get_num_threads() == 2 and has_openmp()


# Multiplications, and outputs, of a weight's gradient from which on our product is faster than oneDNN's.
LEAST_LARGE, FEWEST_LARGE = 1 << 15, 16


def amx_product_is_profitable(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether ``grad.t() @ x`` is faster by ``amx_product``; grad: [rows, outputs], x: [rows, inputs].

    bf16 on CPU with AMX, one thread, of oneDNN's time: 0.5 to 0.8 from 8 to 512 rows of 64 x 64 to 3072 x 768, 0.5 to
    0.95 for more; cast to fp32, of oneDNN's and a cast's 0.4 to 0.8. 1.0 to 1.15 for 1 or 13 outputs. With two threads
    as many times as fast as with one, 1.0 to 1.4 with casts and sums for 32 to 25,088 rows.
    """
    large = outputs >= FEWEST_LARGE and rows * outputs * inputs >= LEAST_LARGE
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_amx() and large


def grouped_product_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether products of groups of rows, of other numbers at each call, are faster by compiled C.

    bf16 on CPU: oneDNN compiles a kernel for each number of rows, for milliseconds. A step of a Mixtral (512 wide, 4
    experts) took 0.55 of the time with one thread, 0.46 with two; inference 0.92.
    """
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16()


# Multiplications up to which a product is faster in a kernel that packs what it needs and no more; and with several
# threads, on which the library's is spread. Elements of a result from which on it is all about writing them.
MOST_MULTIPLIED, MOST_MULTIPLIED_BY_SEVERAL, MOST_OF_A_RESULT = 1 << 24, 1 << 20, 1 << 18


def small_product_is_profitable(device: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> bool:
    """Say whether a product of ``rows`` x ``depth`` by ``depth`` x ``columns`` is faster in compiled code of our own.

    bf16 on CPU with dot products, one thread (``benchmarks/small_products.py``): 3 to 27 times as fast up to a million
    multiplications, 1.3 to 2.7 times up to 8 million, 1.2 to 1.3 times at 17 million, 1.0 to 1.15 times from 67 million
    on; 0.74 to 0.78 for results of a million elements from a depth of 1 or 8.
    """
    if device != "cpu" or dtype != torch.bfloat16 or not cpu_has_bf16() or cpu_has_amx():
        return False
    most = MOST_MULTIPLIED if torch.get_num_threads() == 1 else MOST_MULTIPLIED_BY_SEVERAL
    return 0 < rows * columns * depth <= most and rows * columns <= MOST_OF_A_RESULT


# Sizes of an LSTM's state, and what that is of a batch, from which on oneDNN's backward loses to products.
FEWEST_OF_A_STATE, STATES_OF_A_BATCH = 512, 32


def lstm_backward_is_profitable(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether an LSTM's backward by large products beats oneDNN's, with ``batch`` states of ``size``.

    bf16 on CPU with dot products, 64 steps: 2.2 times as fast for 8 states of 512, 1.5 for 16, 1.0 for 32, 0.75 for 64;
    1.2 for 32 of 1,024; 0.3 to 0.5 for states of 128 and 256, where single calls count.
    """
    fits = device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()
    return fits and size >= FEWEST_OF_A_STATE and batch * STATES_OF_A_BATCH <= size


STATES_BY_UNITS = 8  # what the size of an LSTM's state is of a batch, from which on matrix units of ours are faster


def lstm_kernel_is_profitable(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether an LSTM layer that trains is faster by compiled C, with ``batch`` states of ``size``.

    bf16 on CPU with dot products, forward and backward (``benchmarks/lstm_backward.py``): 1.35 to 1.5 times as fast
    as oneDNN for 64 steps of 32 states of 512, 1.2 to 2.9 for 8 and 16, 1.2 for 64, 1.1 for 128; 1.7 for 32 of 1,024,
    1.1 for 20 of 256, 1.0 for 32 of 128, 1.2 for 4 of 64; with two threads 1.0 to 2.4. With AMX 1.7 for 32 of 512, 3.2
    to 1.2 for 8 to 64, 0.8 for 128; 2.4 for 32 of 1,024, 1.5 for 20 of 256, 0.8 for 32 of 128, 1.2 for 4 of 64; with
    two threads 2.1 for 32 of 512, 2.9 to 1.6 for 8 to 64, 1.1 for 128, 1.0 for 32 of 128.
    """
    known = device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() and _shares_threads()
    return known and (not cpu_has_amx() or batch * STATES_BY_UNITS <= size)
