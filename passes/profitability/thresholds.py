"""Where a rewrite pays, by what the machine can do: the one place that says so, with the files named after it.

Before: a pass that rewrites what it can. After: ``if explicit_backward_is_profitable(...)``. The figures are those of
``benchmarks/``; a machine with matrix units (AMX) and one with bf16 dot products only were measured.
"""

from __future__ import annotations

import torch

from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.cpu import cpu_has_amx, cpu_has_bf16, multiplies_bf16
from amp_graph.passes.torch_compat.fake import concrete_size

# Products of queries and keys of one head up to which materializing them beats the CPU's flash backward.
MOST_SCORES = 512 * 512


def few_calls_are_profitable(device: str) -> bool:
    """Say whether one call for many small tensors beats one for each.

    H200: a cast of a weight takes its kernel 2 us and the host 16 to 24 us, a quarter of the time of a GPT's token.
    """
    return device == "cuda"


def explicit_backward_is_profitable(device: str, dtype: torch.dtype, queries: int, keys: int) -> bool:
    """Say whether attention's backward by matrix products beats torch's kernel on ``device``.

    bf16 on CPU: forward and backward take 0.5-0.8 of the kernel's time at 128 to 512 tokens with dot products, backward
    0.15-1.1 of it with matrix units. From 1,024 tokens on they lose.
    """
    return device == "cpu" and dtype == torch.bfloat16 and queries * keys <= MOST_SCORES and multiplies_bf16()


def attention_call_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether one call of attention beats its formula, which makes all scores and keeps the probabilities.

    CPU: where a kernel of ours runs it. CUDA, in low precision: by flash or memory-efficient attention.
    """
    return attention_kernel_is_profitable(device, dtype) or (device == "cuda" and dtype in HALVES)


def attention_kernel_is_profitable(device: str, dtype: torch.dtype, queries: int | None = None) -> bool:
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


def torchs_attention_is_profitable(heads: int, queries: int, keys: int) -> bool:
    """Say whether torch's kernel is faster for ``heads`` (of all batches) without gradients, where ours runs.

    bf16 on CPU with dot products, widths of 64: a call of ours takes 20 us and little more for 256 to 4,096 scores,
    torch's 5 us and 3 us a head: 0.4 of the time for one head of 16 x 16, 0.7 for four of them and two of 32 x 32, 1.0
    for four of 32 x 32, 1.2 for twelve of 16 x 16.
    """
    return heads <= FEW_HEADS and heads * queries * keys <= FEW_SCORES


def casting_parts_is_profitable(device: str, elements: int | torch.SymInt) -> bool:
    """Say whether parts of a whole of so many elements are better cast on their way into it.

    On the CPU from 100,000 elements on, 1.9 to 2.5 times as fast: all of it is written and read once less. Below, a
    copy for each part takes as long.
    """
    return device == "cpu" and concrete_size(elements) >= 100_000


# Logits from which on their fp32 copies leave the caches, and are mapped and paged in anew at each call.
FEWEST_LOGITS = 1 << 22


def cross_entropy_in_parts_is_profitable(device: str, dtype: torch.dtype, rows: int, classes: int) -> bool:
    """Say whether a loss from low-precision logits, a few rows at a time, beats ``cross_entropy(logits.float())``.

    bf16 on CPU with dot products, forward and backward of the linear and the loss: 1.13 to 1.42 times as fast from 5
    million logits on, 1.09 to 1.19 where they are returned too; 1.01 to 1.03 at 4 million, 1.00 to 1.03 at 2 million;
    at 1 million, all in cache, mostly 0.96 to 1.01.
    Logits that are multiplied again in backward, or by chunks of tokens, were slower than these at every size
    (``benchmarks/cross_entropy.py``). Matrix units were not timed.
    """
    return device == "cpu" and dtype == torch.bfloat16 and rows * classes >= FEWEST_LOGITS and multiplies_bf16()


# Arithmetic and elements of a step that takes some ten milliseconds: of less, what calls cost is a part worth saving.
MOST_FLOPS, MOST_ELEMENTS = 1 << 30, 1 << 24


def calling_from_cpp_is_profitable(device: str, flops: int, elements: int) -> bool:
    """Say whether a step of so many ``flops``, and ``elements`` of results, is worth compiling its calls, too.

    CPU, three layers of 256 at batch 32: 0.85 to 0.9 of the time; the demo's residual network (0.6 GFLOP, 12 million
    elements): 0.93 to 0.96. The C++ compiler takes some ten seconds more.
    """
    return device == "cpu" and flops <= MOST_FLOPS and elements <= MOST_ELEMENTS


def looking_is_profitable(looked_at: int, spared: int) -> bool:
    """Say whether it takes less to look at so many elements than passes over ``spared`` bf16 ones, for relus or maxima.

    The sum of fp32 elements takes 0.06 us a thousand, a relu in place of bf16 ones 0.07, a call of its own 5 to 10 us.
    """
    return spared > 2 * looked_at + 200_000


def accumulating_is_profitable(device: str, dtype: torch.dtype, in_place: bool) -> bool:
    """Say whether a product that adds to a tensor beats a product and a sum; ``in_place``: to a tensor nobody needs.

    CPU with bf16 dot products: bf16 in place is 0.98 (4096 x 768) to 1.07 (1024 x 256) times as fast, and
    saves a tensor and a rounding; out of place 0.96 to 1.03. fp32 is 1.00 to 1.07 times as fast in both. fp16 was not
    timed. CUDA, from documentation alone: the sum is part of the product's kernel (cuBLAS' ``beta``).
    """
    return device != "cpu" or dtype == torch.float32 or (dtype == torch.bfloat16 and in_place)


def scattering_is_profitable(device: str, rows: int, table: int) -> bool:
    """Say whether ``rows`` gradients of an embedding are added to one of its whole ``table`` faster row by row.

    CPU: 3.3 to 3.6 times as fast for 1,024 rows of GPT-2's and BERT's tables, 2.1 times for 4,096 rows of 1,000; and a
    table less. On CUDA ``index_add_`` adds in an order that changes from run to run.
    """
    return device == "cpu" and rows <= 8 * table


def widening_together_is_profitable(device: str) -> bool:
    """Say whether gradients are better cast to fp32 many by one call than each by its own, as soon as it is made.

    CUDA, where a cast of a small gradient takes no longer than to start it; not timed.
    """
    return device == "cuda"


def reducing_from_low_is_profitable(device: str) -> bool:
    """Say whether reductions to fp32 widen what they read in registers: on CUDA. On the CPU torch makes a copy."""
    return device == "cuda"


# Elements up to which a call more costs more than what it saves.
FEWEST_WIDENED = 1 << 16


def widening_first_is_profitable(device: str, elements: int) -> bool:
    """Say whether a sum of two precisions is faster once the lower one is widened by a cast, and added to in place.

    CPU: torch adds mixed operands by way of a copy, and into a new tensor. 1.1 to 1.6 times as fast from 65,536
    elements on, 0.75 at 16,384. On CUDA operands promote in registers.
    """
    return device == "cpu" and elements >= FEWEST_WIDENED


# Products of two numbers below which a call's own cost hides what its kernel takes.
LEAST_ALIGNED = 1 << 24


def aligning_is_profitable(device: str, dtype: torch.dtype, products: int) -> bool:
    """Say whether a matrix product of odd sizes is faster when they are padded to multiples of 8.

    CUDA, from NVIDIA's documentation of matrix multiplication alone ("Performance Requirements for Tensor Cores": 16
    bytes, 8 elements of fp16 or bf16). bf16 on CPU with dot products, GPT-2's 50257 words as 50264, 1,024 and 256 rows:
    result and gradient of the input 1.01 to 1.03 times as fast, of the weight 1.12 times, before the padding is paid
    for: a copy of the weight, and one of the logits' gradient. It does not pay there.
    """
    return device == "cuda" and dtype in HALVES and products >= LEAST_ALIGNED


# Elements of an activation from which on looking it up is worth a function with a backward of its own; and the forms
# whose vectors CPUs without matrix units compute in less time than they gather so many numbers.
LEAST_LOOKED_UP = {"gelu": 1 << 16, "silu": 1 << 17, "gelu by tanh": 1 << 14, "mish": 1 << 13}
LEAST_OF_USERS = 1 << 14  # of what is no function of torch's: two or more passes over memory, at least
QUICK = ("gelu", "silu")


def table_is_profitable(device: str, form: str, elements: int | torch.SymInt) -> bool:
    """Say whether an activation of bf16 is better looked up than computed: ``form`` is one of ``by_table.FORMS``.

    CPU with AMX, 3 million elements, of torch's time forward and in backward: GELU 0.56 and 0.38, by tanh 0.13 and
    0.15, SiLU 0.46 and 0.45, Mish 0.06 and 0.06. A step took, of the time: of a residual network with Mish 0.55, with
    GELUs 0.91, of HF's GPT-2 (by tanh) 0.95, of a ViT 0.96, of BERT and GPT 0.99.
    """
    fits = device == "cpu" and cpu_has_bf16() and (cpu_has_amx() or form not in QUICK)
    return fits and concrete_size(elements) >= LEAST_LOOKED_UP.get(form, LEAST_OF_USERS)


# Elements below which the call of a function with a backward of its own is seen.
FEWEST_DROPPED = 1 << 13


def dropout_in_bits_is_profitable(device: str, elements: int | torch.SymInt) -> bool:
    """Say whether a dropout of so many ``elements`` is faster by compiled C, drawn by vectors.

    CPU, forward and backward of 393,216, of torch's time: 0.29 (fp32) and 0.24 (bf16) with one thread, 0.22 and 0.18
    with two. Steps of small HF models at their default of 0.1 took 0.87 to 0.95 of the time.
    """
    return device == "cpu" and concrete_size(elements) >= FEWEST_DROPPED


# Elements, of weights with low-precision copies and of tables that embeddings read, below which compiling, a second
# once a machine, is not worth its time.
FEWEST_UPDATED = 1 << 20


def one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether an update of ``elements`` weights in one pass of compiled C is worth a C compiler's second.

    CPU: see ``benchmarks/update_time.py``. A step of DLRM, with 10 million elements in tables and few others, took 0.74
    of the time.
    """
    return device == "cpu" and elements >= FEWEST_UPDATED


# Bytes of gradients below which memory stays with the process when it is freed.
LEAST_TABLES = 1 << 22


def reusing_gradients_is_profitable(device: str, tables: int, computed: int) -> bool:
    """Say whether the gradients of embeddings' ``tables`` (bytes) are better made in memory that is kept for them.

    CPU: memory of some megabytes is returned to the system when a gradient is freed, and paged in anew at each step:
    with 41 MB of tables, a step of DLRM took 1.5 times as long. Kept, it adds to the peak of a step at most what the
    graph has ``computed`` (bytes), as all gradients exist in the end. Language models compute more than their tables.
    """
    return device == "cpu" and tables >= max(LEAST_TABLES, computed)


# Elements of the gradients of bags of rows below which a call for each place of a bag is seen.
LEAST_BY_PLACE = 1 << 14


def adding_by_place_is_profitable(elements: int) -> bool:
    """Say whether rows of bags are better added to a table by a call for each place than written out before.

    CPU, 4 to 100 places of widths of 64 and 256: 1.2 to 2 times as fast from 16,384 ``elements`` of all bags on, 4.5
    times where what is written out is paged in anew; 0.4 to 0.7 times below.
    """
    return elements >= LEAST_BY_PLACE


# Elements of a norm below which a call of a function with a backward of its own is seen, more than memory.
FEWEST_NORMED = 1 << 17


def norm_in_one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether a residual sum, a norm and their casts are faster as one pass of compiled C over ``elements``.

    CPU, forward and backward, times of torch's operations for one reader in low precision and for three, with AVX-512:
    1.1 and 0.8 at 65,536 elements, 0.8 and 0.7 at 131,072, 0.65 at 302,592, 0.4 at 3 million; without gradients 0.7 at
    131,072. Below, a call of a function with a backward of its own counts (``benchmarks/residual_norm.py``).
    """
    return device == "cpu" and elements >= FEWEST_NORMED


# Bytes from which on glibc maps every block anew, whatever was freed before: its threshold ends there (mallopt(3)).
LEAST_MAPPED = 1 << 25


def large_pages_are_profitable(device: str, size: int) -> bool:
    """Say whether new memory of ``size`` bytes is better mapped by large pages.

    CPU: widening 42 MB of logits took 3.4 ms instead of 13, and 1.3 in memory that was mapped already; inference took
    0.92 (BERT) and 0.81 (LSTM) of the time. Smaller blocks mostly come from what was freed, whose pages are there.
    """
    return device == "cpu" and size >= LEAST_MAPPED
