"""Where a rewrite pays, by what the machine can do: the one place that says so, with ``what_pays_for_images.py``.

Before: a pass that rewrites what it can. After: ``if explicit_backward_pays(...)``. The figures are those of
``benchmarks/``; a machine with matrix units (AMX) and one with bf16 dot products only were measured.
"""

from __future__ import annotations

import torch

from amp_graph.passes.facts import HALVES
from amp_graph.passes.native_code import has_openmp, threads_for
from amp_graph.passes.torch_private import concrete_size, cpu_has_amx, cpu_has_bf16, multiplies_bf16

# Products of queries and keys of one head up to which materializing them beats the CPU's flash backward.
MOST_SCORES = 512 * 512


def few_calls_pay(device: str) -> bool:
    """Say whether one call for many small tensors beats one for each.

    H200: a cast of a weight takes its kernel 2 us and the host 16 to 24 us, a quarter of the time of a GPT's token.
    """
    return device == "cuda"


def explicit_backward_pays(device: str, dtype: torch.dtype, queries: int, keys: int) -> bool:
    """Say whether attention's backward by matrix products beats torch's kernel on ``device``.

    bf16 on CPU: forward and backward take 0.5-0.8 of the kernel's time at 128 to 512 tokens with dot products, backward
    0.15-1.1 of it with matrix units. From 1,024 tokens on they lose.
    """
    return device == "cpu" and dtype == torch.bfloat16 and queries * keys <= MOST_SCORES and multiplies_bf16()


def attention_call_pays(device: str, dtype: torch.dtype) -> bool:
    """Say whether one call of attention beats its formula, which makes all scores and keeps the probabilities.

    CPU: where a kernel of ours runs it. CUDA, in low precision: by flash or memory-efficient attention.
    """
    return attention_kernel_pays(device, dtype) or (device == "cuda" and dtype in HALVES)


def attention_kernel_pays(device: str, dtype: torch.dtype, queries: int | None = None) -> bool:
    """Say whether attention in compiled C of ours, forward and backward, beats torch's kernel.

    ``queries``: how many there are, where no gradients are wanted.

    bf16 on CPU, one thread, 16 to 2,048 tokens, causal or not (``benchmarks/attention.py``). With dot products: forward
    2.1 to 3.8 times as fast (5 to 7 times for one query), backward 2 to 17 times, and 2.4 to 5 times as fast as torch's
    products. With matrix units: forward 1.2 to 2.4 times (1.1 to 1.6 for 2 to 16 queries, 0.5 to 0.8 for one), backward
    2 to 31 times, and 3.7 to 8 times as fast as products.
    """
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() and (queries != 1 or not cpu_has_amx())


# Heads of all batches, and scores of all heads, up to which a call of compiled C takes longer than torch's kernel.
FEW_HEADS, FEW_SCORES = 4, 2048


def torchs_attention_pays(heads: int, queries: int, keys: int) -> bool:
    """Say whether torch's kernel is faster for ``heads`` (of all batches) without gradients, where ours runs.

    bf16 on CPU with dot products, widths of 64: a call of ours takes 20 us and little more for 256 to 4,096 scores,
    torch's 5 us and 3 us a head: 0.4 of the time for one head of 16 x 16, 0.7 for four of them and two of 32 x 32, 1.0
    for four of 32 x 32, 1.2 for twelve of 16 x 16.
    """
    return heads <= FEW_HEADS and heads * queries * keys <= FEW_SCORES


def casting_parts_pays(device: str, elements: int | torch.SymInt) -> bool:
    """Say whether parts of a whole of so many elements are better cast on their way into it.

    On the CPU from 100,000 elements on, 1.9 to 2.5 times as fast: all of it is written and read once less. Below, a
    copy for each part takes as long.
    """
    return device == "cpu" and concrete_size(elements) >= 100_000


def own_product_pays(device: str, rows: int, width: int) -> bool:
    """Say whether ``x @ x.mT`` of ``x`` [..., rows, width] should have one product for its gradient, of ``g + g.mT``.

    bf16 on CPU with AMX, forward and backward with the sum of the two: 2.4 times as fast for 2,048 of 9 x 64, 1.3 for
    2,048 of 27 x 64 and for one of 128 x 512, 1.1 for 256 of 64 x 64; 0.9 for 64 of 128 x 64, 0.4 for one of
    1,024 x 128, where what is turned and added is larger than the operands.
    """
    return device == "cpu" and 1 < rows <= width


# Logits from which on their fp32 copies leave the caches, and are mapped and paged in anew at each call.
FEWEST_LOGITS = 1 << 22


def cross_entropy_in_parts_pays(device: str, dtype: torch.dtype, rows: int, classes: int) -> bool:
    """Say whether a loss from low-precision logits, a few rows at a time, beats ``cross_entropy(logits.float())``.

    bf16 on CPU with dot products, forward and backward of the linear and the loss: 1.13 to 1.42 times as fast from 5
    million logits on, 1.09 to 1.19 where they are returned too; 1.01 to 1.03 at 4 million, 1.00 to 1.03 at 2 million;
    at 1 million, all in cache, mostly 0.96 to 1.01.
    Logits that are multiplied again in backward, or by chunks of tokens, were slower than these at every size
    (``benchmarks/cross_entropy.py``). Matrix units were not timed.
    """
    return device == "cpu" and dtype == torch.bfloat16 and rows * classes >= FEWEST_LOGITS and multiplies_bf16()


def _shares_threads() -> bool:
    """Say whether our products run on as many threads as oneDNN's."""
    return torch.get_num_threads() == 1 or has_openmp()


# A product with fewer outputs runs another kernel, which wants no layout of its own.
FEWEST_OUTPUTS = 16


def packing_pays(device: str, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
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


def panels_pay(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
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


def small_linear_pays(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
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


def bias_in_product_pays(device: str, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Say whether a product's kernel should add the bias itself, instead of to a result that starts as the bias.

    bf16 on CPU with dot products, weights as they lie: 1.08 times as fast for 512 rows of 768 x 3072, 1.10 for 788 of
    384 x 1536, 1.3 for 32 of 256 x 256; 1.00 to 1.03 for 1,024 rows of 13 x 512 and 512 x 256.
    """
    return packing_pays(device, dtype, outputs, inputs)


# Elements of a linear's result from which on copying the bias there takes longer than a function of our own is called.
LEAST_BIASED = 1 << 18


def bias_in_trained_linear_pays(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear that trains under autograd should give its bias to the product.

    bf16 on CPU with dot products: a step of BERT took 0.97, of a ViT 0.98 of the time, of GPT and a DLRM 0.99. A result
    that is mapped anew is paged in faster by the copy than by the product: 2,048 of 512 x 8192 took 1.1 times as long.
    """
    fits = LEAST_BIASED <= rows * outputs < LEAST_MAPPED // dtype.itemsize
    return fits and bias_in_product_pays(device, dtype, outputs, inputs)


# Multiplications from which on the call of a function with a backward of its own is not seen, with matrix units.
LEAST_BY_FUNCTION = 1 << 28


def training_by_function_pays(rows: int, outputs: int, inputs: int) -> bool:
    """Say whether a linear that trains under autograd is so large that a function of Python around it is not seen.

    bf16 with AMX, casts of weight and bias included: ours takes some 0.1 ms more, in caches that others have filled. Of
    torch's speed 0.7 to 0.8 up to 40 million multiplications, 0.8 to 0.95 at 75 to 226 million, 1.0 to 1.15 from 268
    million on, with one thread and with two. With dot products a multiplication takes six times as long.
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


def amx_product_pays(device: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
    """Say whether ``grad.t() @ x`` is faster by ``amx_product``; grad: [rows, outputs], x: [rows, inputs].

    bf16 on CPU with AMX, one thread, of oneDNN's time: 0.5 to 0.8 from 8 to 512 rows of 64 x 64 to 3072 x 768, 0.5 to
    0.95 for more; cast to fp32, of oneDNN's and a cast's 0.4 to 0.8. 1.0 to 1.15 for 1 or 13 outputs. With two threads
    as many times as fast as with one, 1.0 to 1.4 with casts and sums for 32 to 25,088 rows.
    """
    large = outputs >= FEWEST_LARGE and rows * outputs * inputs >= LEAST_LARGE
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_amx() and large


def grouped_product_pays(device: str, dtype: torch.dtype) -> bool:
    """Say whether products of groups of rows, of other numbers at each call, are faster by compiled C.

    bf16 on CPU: oneDNN compiles a kernel for each number of rows, for milliseconds. A step of a Mixtral (512 wide, 4
    experts) took 0.55 of the time with one thread, 0.46 with two; inference 0.92.
    """
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16()


# Arithmetic and elements of a step that takes some ten milliseconds: of less, what calls cost is a part worth saving.
MOST_FLOPS, MOST_ELEMENTS = 1 << 30, 1 << 24


def calling_from_cpp_pays(device: str, flops: int, elements: int) -> bool:
    """Say whether a step of so many ``flops``, and ``elements`` of results, is worth compiling its calls, too.

    CPU, three layers of 256 at batch 32: 0.85 to 0.9 of the time; the demo's residual network (0.6 GFLOP, 12 million
    elements): 0.93 to 0.96. The C++ compiler takes some ten seconds more.
    """
    return device == "cpu" and flops <= MOST_FLOPS and elements <= MOST_ELEMENTS


# Multiplications up to which a product is faster in a kernel that packs what it needs and no more; and with several
# threads, on which the library's is spread. Elements of a result from which on it is all about writing them.
MOST_MULTIPLIED, MOST_MULTIPLIED_BY_SEVERAL, MOST_OF_A_RESULT = 1 << 24, 1 << 20, 1 << 18


def small_product_pays(device: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> bool:
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


def lstm_backward_pays(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether an LSTM's backward by large products beats oneDNN's, with ``batch`` states of ``size``.

    bf16 on CPU with dot products, 64 steps: 2.2 times as fast for 8 states of 512, 1.5 for 16, 1.0 for 32, 0.75 for 64;
    1.2 for 32 of 1,024; 0.3 to 0.5 for states of 128 and 256, where single calls count.
    """
    fits = device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()
    return fits and size >= FEWEST_OF_A_STATE and batch * STATES_OF_A_BATCH <= size


STATES_BY_UNITS = 8  # what the size of an LSTM's state is of a batch, from which on matrix units of ours are faster


def lstm_kernel_pays(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether an LSTM layer that trains is faster by compiled C, with ``batch`` states of ``size``.

    bf16 on CPU with dot products, forward and backward (``benchmarks/lstm_backward.py``): 1.35 to 1.5 times as fast
    as oneDNN for 64 steps of 32 states of 512, 1.2 to 2.9 for 8 and 16, 1.2 for 64, 1.1 for 128; 1.7 for 32 of 1,024,
    1.1 for 20 of 256, 1.0 for 32 of 128, 1.2 for 4 of 64; with two threads 1.0 to 2.4. With AMX 1.7 for 32 of 512, 3.2
    to 1.2 for 8 to 64, 0.8 for 128; 2.4 for 32 of 1,024, 1.5 for 20 of 256, 0.8 for 32 of 128, 1.2 for 4 of 64; with
    two threads 2.1 for 32 of 512, 2.9 to 1.6 for 8 to 64, 1.1 for 128, 1.0 for 32 of 128.
    """
    known = device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() and _shares_threads()
    return known and (not cpu_has_amx() or batch * STATES_BY_UNITS <= size)


def looking_pays(looked_at: int, spared: int) -> bool:
    """Say whether it takes less to look at so many elements than passes over ``spared`` bf16 ones, for relus or maxima.

    The sum of fp32 elements takes 0.06 us a thousand, a relu in place of bf16 ones 0.07, a call of its own 5 to 10 us.
    """
    return spared > 2 * looked_at + 200_000


def accumulating_pays(device: str, dtype: torch.dtype, in_place: bool) -> bool:
    """Say whether a product that adds to a tensor beats a product and a sum; ``in_place``: to a tensor nobody needs.

    CPU with bf16 dot products: bf16 in place is 0.98 (4096 x 768) to 1.07 (1024 x 256) times as fast, and
    saves a tensor and a rounding; out of place 0.96 to 1.03. fp32 is 1.00 to 1.07 times as fast in both. fp16 was not
    timed. CUDA, from documentation alone: the sum is part of the product's kernel (cuBLAS' ``beta``).
    """
    return device != "cpu" or dtype == torch.float32 or (dtype == torch.bfloat16 and in_place)


def scattering_pays(device: str, rows: int, table: int) -> bool:
    """Say whether ``rows`` gradients of an embedding are added to one of its whole ``table`` faster row by row.

    CPU: 3.3 to 3.6 times as fast for 1,024 rows of GPT-2's and BERT's tables, 2.1 times for 4,096 rows of 1,000; and a
    table less. On CUDA ``index_add_`` adds in an order that changes from run to run.
    """
    return device == "cpu" and rows <= 8 * table


def widening_together_pays(device: str) -> bool:
    """Say whether gradients are better cast to fp32 many by one call than each by its own, as soon as it is made.

    CUDA, where a cast of a small gradient takes no longer than to start it; not timed.
    """
    return device == "cuda"


def reducing_from_low_pays(device: str) -> bool:
    """Say whether reductions to fp32 widen what they read in registers: on CUDA. On the CPU torch makes a copy."""
    return device == "cuda"


# Elements up to which a call more costs more than what it saves.
FEWEST_WIDENED = 1 << 16


def widening_first_pays(device: str, elements: int) -> bool:
    """Say whether a sum of two precisions is faster once the lower one is widened by a cast, and added to in place.

    CPU: torch adds mixed operands by way of a copy, and into a new tensor. 1.1 to 1.6 times as fast from 65,536
    elements on, 0.75 at 16,384. On CUDA operands promote in registers.
    """
    return device == "cpu" and elements >= FEWEST_WIDENED


# Products of two numbers below which a call's own cost hides what its kernel takes.
LEAST_ALIGNED = 1 << 24


def aligning_pays(device: str, dtype: torch.dtype, products: int) -> bool:
    """Say whether a matrix product of odd sizes is faster when they are padded to multiples of 8.

    CUDA, from NVIDIA's documentation of matrix multiplication alone ("Performance Requirements for Tensor Cores": 16
    bytes, 8 elements of fp16 or bf16). bf16 on CPU with dot products, GPT-2's 50257 words as 50264, 1,024 and 256 rows:
    result and gradient of the input 1.01 to 1.03 times as fast, of the weight 1.12 times, before the padding is paid
    for: a copy of the weight, and one of the logits' gradient. It does not pay there.
    """
    return device == "cuda" and dtype in HALVES and products >= LEAST_ALIGNED


# Products an element read below which a kernel more is seen: of a norm or GELU, and of a batch norm's relu.
LEAST_PRODUCTS, LEAST_PRODUCTS_OF_RELU = 256, 64
# Elements below which what a call costs is seen, more than memory: steps of small networks took 1.06 of the time.
FEWEST_COMPUTED_AGAIN = 1 << 18


def computing_again_pays(of_relu: bool, products: float, elements: int, thorough: bool) -> bool:
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


# Elements of an activation from which on looking it up is worth a function with a backward of its own; and the forms
# whose vectors CPUs without matrix units compute in less time than they gather so many numbers.
LEAST_LOOKED_UP = {"gelu": 1 << 16, "silu": 1 << 17, "gelu by tanh": 1 << 14, "mish": 1 << 13}
LEAST_OF_USERS = 1 << 14  # of what is no function of torch's: two or more passes over memory, at least
QUICK = ("gelu", "silu")


def table_pays(device: str, form: str, elements: int | torch.SymInt) -> bool:
    """Say whether an activation of bf16 is better looked up than computed: ``form`` is one of ``by_table.FORMS``.

    CPU with AMX, 3 million elements, of torch's time forward and in backward: GELU 0.56 and 0.38, by tanh 0.13 and
    0.15, SiLU 0.46 and 0.45, Mish 0.06 and 0.06. A step took, of the time: of a residual network with Mish 0.55, with
    GELUs 0.91, of HF's GPT-2 (by tanh) 0.95, of a ViT 0.96, of BERT and GPT 0.99.
    """
    fits = device == "cpu" and cpu_has_bf16() and (cpu_has_amx() or form not in QUICK)
    return fits and concrete_size(elements) >= LEAST_LOOKED_UP.get(form, LEAST_OF_USERS)


# Elements below which the call of a function with a backward of its own is seen.
FEWEST_DROPPED = 1 << 13


def dropout_in_bits_pays(device: str, elements: int | torch.SymInt) -> bool:
    """Say whether a dropout of so many ``elements`` is faster by compiled C, drawn by vectors.

    CPU, forward and backward of 393,216, of torch's time: 0.29 (fp32) and 0.24 (bf16) with one thread, 0.22 and 0.18
    with two. Steps of small HF models at their default of 0.1 took 0.87 to 0.95 of the time.
    """
    return device == "cpu" and concrete_size(elements) >= FEWEST_DROPPED


# Elements, of weights with low-precision copies and of tables that embeddings read, below which compiling, a second
# once a machine, is not worth its time.
FEWEST_UPDATED = 1 << 20


def one_pass_pays(device: str, elements: int) -> bool:
    """Say whether an update of ``elements`` weights in one pass of compiled C is worth a C compiler's second.

    CPU: see ``benchmarks/update_time.py``. A step of DLRM, with 10 million elements in tables and few others, took 0.74
    of the time.
    """
    return device == "cpu" and elements >= FEWEST_UPDATED


# Bytes of gradients below which memory stays with the process when it is freed.
LEAST_TABLES = 1 << 22


def reusing_gradients_pays(device: str, tables: int, computed: int) -> bool:
    """Say whether the gradients of embeddings' ``tables`` (bytes) are better made in memory that is kept for them.

    CPU: memory of some megabytes is returned to the system when a gradient is freed, and paged in anew at each step:
    with 41 MB of tables, a step of DLRM took 1.5 times as long. Kept, it adds to the peak of a step at most what the
    graph has ``computed`` (bytes), as all gradients exist in the end. Language models compute more than their tables.
    """
    return device == "cpu" and tables >= max(LEAST_TABLES, computed)


# Elements of the gradients of bags of rows below which a call for each place of a bag is seen.
LEAST_BY_PLACE = 1 << 14


def adding_by_place_pays(elements: int) -> bool:
    """Say whether rows of bags are better added to a table by a call for each place than written out before.

    CPU, 4 to 100 places of widths of 64 and 256: 1.2 to 2 times as fast from 16,384 ``elements`` of all bags on, 4.5
    times where what is written out is paged in anew; 0.4 to 0.7 times below.
    """
    return elements >= LEAST_BY_PLACE


# Elements of a norm below which a call of a function with a backward of its own is seen, more than memory.
FEWEST_NORMED = 1 << 17


def norm_in_one_pass_pays(device: str, elements: int) -> bool:
    """Say whether a residual sum, a norm and their casts are faster as one pass of compiled C over ``elements``.

    CPU, forward and backward, times of torch's operations for one reader in low precision and for three, with AVX-512:
    1.1 and 0.8 at 65,536 elements, 0.8 and 0.7 at 131,072, 0.65 at 302,592, 0.4 at 3 million; without gradients 0.7 at
    131,072. Below, a call of a function with a backward of its own counts (``benchmarks/residual_norm.py``).
    """
    return device == "cpu" and elements >= FEWEST_NORMED


# Bytes from which on glibc maps every block anew, whatever was freed before: its threshold ends there (mallopt(3)).
LEAST_MAPPED = 1 << 25


def large_pages_pay(device: str, size: int) -> bool:
    """Say whether new memory of ``size`` bytes is better mapped by large pages.

    CPU: widening 42 MB of logits took 3.4 ms instead of 13, and 1.3 in memory that was mapped already; inference took
    0.92 (BERT) and 0.81 (LSTM) of the time. Smaller blocks mostly come from what was freed, whose pages are there.
    """
    return device == "cpu" and size >= LEAST_MAPPED
