"""Thresholds that decide whether a rewrite is profitable on the machine; the other files of this folder hold more.

Before: a pass that rewrites everything it can. After: ``if explicit_backward_is_profitable(...)``. The numbers come
from ``benchmarks/``, on a machine with AMX and on one with only bf16 dot products.
"""

from __future__ import annotations

import torch

from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.cpu import cpu_has_amx, cpu_has_bf16, multiplies_bf16
from amp_graph.passes.torch_compat.fake import concrete_size

# Scores (queries times keys) per head up to which materializing them beats the CPU's flash backward.
MOST_SCORES = 512 * 512


def few_calls_are_profitable(device: str) -> bool:
    """Say whether one call for many small tensors beats one call for each.

    H200: the cast of a weight takes 2 us on the GPU and 16 to 24 us on the host; the casts are a quarter of the time
    of a GPT's token.
    """
    return device == "cuda"


def explicit_backward_is_profitable(device: str, dtype: torch.dtype, queries: int, keys: int) -> bool:
    """Say whether attention's backward by matmuls beats torch's kernel on ``device``.

    Time over the kernel's, bf16 on CPU, 128 to 512 tokens: forward and backward 0.5 to 0.8 with dot products; backward
    0.15 to 1.1 with AMX. From 1,024 tokens on the matmuls are slower.
    """
    return device == "cpu" and dtype == torch.bfloat16 and queries * keys <= MOST_SCORES and multiplies_bf16()


def attention_call_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether one attention call beats its formula, which materializes all scores and saves the probabilities.

    CPU: if one of our kernels runs it. CUDA, low precision: by flash or memory-efficient attention.
    """
    return attention_kernel_is_profitable(device, dtype) or (device == "cuda" and dtype in HALVES)


def attention_kernel_is_profitable(device: str, dtype: torch.dtype, queries: int | None = None) -> bool:
    """Say whether our C attention kernels, forward and backward, beat torch's kernel.

    ``queries``: the number of queries if no gradients are needed, else None.

    Speedups, bf16 on CPU, one thread, 16 to 2,048 tokens, causal or not (``benchmarks/attention.py``). Dot products:
    forward 2.1 to 3.8 (one query: 5 to 7), backward 2 to 17, and 2.4 to 5 over torch's matmuls. AMX: forward 1.2 to 2.4
    (2 to 16 queries: 1.1 to 1.6, one: 0.5 to 0.8), backward 2 to 31, and 3.7 to 8 over matmuls.
    """
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() and (queries != 1 or not cpu_has_amx())


# Heads of the whole batch, and scores of all heads, up to which torch's kernel is faster than a call of our C kernel.
FEW_HEADS, FEW_SCORES = 4, 2048


def torchs_attention_is_profitable(heads: int, queries: int, keys: int) -> bool:
    """Say whether torch's kernel beats ours for so few ``heads`` (of the whole batch) without gradients.

    bf16 on CPU with dot products, width 64: our call takes 20 us, and little more for 256 to 4,096 scores; torch's
    takes 5 us and 3 us per head. Torch's time over ours: 0.4 for one head of 16 x 16, 0.7 for four of 16 x 16 and two
    of 32 x 32, 1.0 for four of 32 x 32, 1.2 for twelve of 16 x 16.
    """
    return heads <= FEW_HEADS and heads * queries * keys <= FEW_SCORES


def casting_parts_is_profitable(device: str, elements: int | torch.SymInt) -> bool:
    """Say whether the operands of a concat with so many elements should be cast while they are copied into it.

    On the CPU this is 1.9 to 2.5 times as fast from 100,000 elements on, as all elements are written and read once
    less. Below, the separate copy of each operand takes as long.
    """
    return device == "cpu" and concrete_size(elements) >= 100_000


# Logits from which on their fp32 copies do not fit the caches, and are mapped and paged in again in each call.
FEWEST_LOGITS = 1 << 22


def cross_entropy_in_parts_is_profitable(device: str, dtype: torch.dtype, rows: int, classes: int) -> bool:
    """Say whether a loss over chunks of low-precision logits beats ``cross_entropy(logits.float())``.

    Speedups, bf16 on CPU with dot products, forward and backward of the linear and the loss: 1.13 to 1.42 from 5
    million logits on, 1.09 to 1.19 if the logits are returned too; 1.01 to 1.03 at 4 million, 1.00 to 1.03 at 2
    million; mostly 0.96 to 1.01 at 1 million, which fit the caches.
    Recomputing the logits in backward, and computing them by chunks of tokens, was slower at every size
    (``benchmarks/cross_entropy.py``). AMX was not timed.
    """
    return device == "cpu" and dtype == torch.bfloat16 and rows * classes >= FEWEST_LOGITS and multiplies_bf16()


# FLOPs and elements of a step of about ten milliseconds: in shorter steps, call overhead is worth removing.
MOST_FLOPS, MOST_ELEMENTS = 1 << 30, 1 << 24


def calling_from_cpp_is_profitable(device: str, flops: int, elements: int) -> bool:
    """Say whether a step of so many ``flops`` and result ``elements`` should also get its calls compiled to C++.

    Time on the CPU: three layers of width 256 at batch 32: 0.85 to 0.9; the demo's residual network (0.6 GFLOP, 12
    million elements): 0.93 to 0.96. The C++ compiler takes about ten seconds more.
    """
    return device == "cpu" and flops <= MOST_FLOPS and elements <= MOST_ELEMENTS


def looking_is_profitable(looked_at: int, spared: int) -> bool:
    """Say whether checking ``looked_at`` elements is cheaper than passes over ``spared`` bf16 ones, for relu or max.

    A sum of fp32 takes 0.06 us per thousand elements, an in-place relu of bf16 0.07 us, each call 5 to 10 us.
    """
    return spared > 2 * looked_at + 200_000


def widening_together_is_profitable(device: str) -> bool:
    """Say whether one call should upcast many gradients, instead of one call per gradient as soon as it is computed.

    On CUDA, where the launch of a small cast takes longer than its kernel; not timed.
    """
    return device == "cuda"


def reducing_from_low_is_profitable(device: str) -> bool:
    """Say whether reductions to fp32 upcast their input in registers: on CUDA. On the CPU torch makes a copy."""
    return device == "cuda"


# Multiplications below which call overhead exceeds the time of the kernel.
LEAST_ALIGNED = 1 << 24


def aligning_is_profitable(device: str, dtype: torch.dtype, products: int) -> bool:
    """Say whether a matmul of odd sizes is faster when they are padded to multiples of 8.

    CUDA: from NVIDIA's documentation of matrix multiplication alone ("Performance Requirements for Tensor Cores": 16
    bytes, 8 elements of fp16 or bf16). CPU: not profitable. Speedups of bf16 with dot products, GPT-2's 50257 words
    padded to 50264, 1,024 and 256 rows: forward and input gradient 1.01 to 1.03, weight gradient 1.12. The padding
    itself, which copies the weight and the logits' gradient, is not included.
    """
    return device == "cuda" and dtype in HALVES and products >= LEAST_ALIGNED


# Elements of an activation from which on a lookup table is worth an autograd.Function. QUICK: the forms that CPUs
# without AMX compute by vectors faster than they gather from a table.
LEAST_LOOKED_UP = {"gelu": 1 << 16, "silu": 1 << 17, "gelu by tanh": 1 << 14, "mish": 1 << 13}
LEAST_OF_USERS = 1 << 14  # for a user's own formula, which takes at least two passes over memory
QUICK = ("gelu", "silu")


def table_is_profitable(device: str, form: str, elements: int | torch.SymInt) -> bool:
    """Say whether a lookup table beats computing a bf16 activation; ``form``: which activation.

    Time over torch's, CPU with AMX, 3 million elements, forward and backward: GELU 0.56 and 0.38, tanh GELU 0.13 and
    0.15, SiLU 0.46 and 0.45, Mish 0.06 and 0.06. Time of a step: a residual network with Mish 0.55, with GELUs 0.91,
    HF's GPT-2 (tanh GELU) 0.95, a ViT 0.96, BERT and GPT 0.99.
    """
    fits = device == "cpu" and cpu_has_bf16() and (cpu_has_amx() or form not in QUICK)
    return fits and concrete_size(elements) >= LEAST_LOOKED_UP.get(form, LEAST_OF_USERS)


# Elements below which the call overhead of an autograd.Function outweighs the gain.
FEWEST_DROPPED = 1 << 13


def dropout_in_bits_is_profitable(device: str, elements: int | torch.SymInt) -> bool:
    """Say whether a dropout of so many ``elements`` is faster by our C kernel, which draws by vectors.

    Time over torch's, CPU, forward and backward of 393,216 elements: 0.29 (fp32) and 0.24 (bf16) with one thread, 0.22
    and 0.18 with two. Steps of small HF models with their default p of 0.1 took 0.87 to 0.95 of the time.
    """
    return device == "cpu" and concrete_size(elements) >= FEWEST_DROPPED


# Elements of weights with low-precision copies, and of embedding tables, below which compiling (about a second, once
# per machine) is not worth its time.
FEWEST_UPDATED = 1 << 20


def one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether an optimizer update of ``elements`` weights by one C kernel is worth a second of compilation.

    CPU: see ``benchmarks/update_time.py``. A step of DLRM with 10 million elements, nearly all in tables, took 0.74 of
    the time.
    """
    return device == "cpu" and elements >= FEWEST_UPDATED


# Bytes of gradients below which the process keeps freed memory.
LEAST_TABLES = 1 << 22


def reusing_gradients_is_profitable(device: str, tables: int, computed: int) -> bool:
    """Say whether gradients of embedding ``tables`` (bytes) should be written to memory that is reused across steps.

    CPU: gradients of a few megabytes are returned to the system when freed, and paged in again in each step: with 41 MB
    of tables, a step of DLRM took 1.5 times as long. Reuse adds at most ``computed`` bytes (all results of the graph)
    to the peak of a step, as all gradients exist at its end. Language models compute more than their tables.
    """
    return device == "cpu" and tables >= max(LEAST_TABLES, computed)


# Elements of the gradients of embedding bags below which one call per position of a bag costs more than it saves.
LEAST_BY_PLACE = 1 << 14


def adding_by_place_is_profitable(elements: int) -> bool:
    """Say whether to add gradients of embedding bags to the table by one call per position, without expanding them.

    Speedups, CPU, bags of 4 to 100 positions, widths of 64 and 256: 1.2 to 2 from 16,384 ``elements`` of all bags on,
    4.5 if the expanded gradients would be paged in again; 0.4 to 0.7 below.
    """
    return elements >= LEAST_BY_PLACE


# Elements of a norm below which the call of an autograd.Function costs more than the saved memory traffic.
FEWEST_NORMED = 1 << 17


def norm_in_one_pass_is_profitable(device: str, elements: int) -> bool:
    """Say whether a residual sum, a norm and their casts are faster as one C kernel over ``elements``.

    Time over torch's, CPU with AVX-512, forward and backward, for one and for three low-precision readers: 1.1 and 0.8
    at 65,536 elements, 0.8 and 0.7 at 131,072, 0.65 at 302,592, 0.4 at 3 million; without gradients 0.7 at 131,072.
    Below, the call of an autograd.Function dominates (``benchmarks/residual_norm.py``).
    """
    return device == "cpu" and elements >= FEWEST_NORMED


# Bytes from which on glibc maps every block anew, whatever was freed before: the maximum of its threshold (mallopt(3)).
LEAST_MAPPED = 1 << 25


def large_pages_are_profitable(device: str, size: int) -> bool:
    """Say whether new memory of ``size`` bytes should be mapped with huge pages.

    CPU: upcasting 42 MB of logits took 3.4 ms instead of 13 (1.3 in memory that was already mapped); inference took
    0.92 (BERT) and 0.81 (LSTM) of the time. Smaller blocks mostly reuse freed memory, whose pages are mapped.
    """
    return device == "cpu" and size >= LEAST_MAPPED
