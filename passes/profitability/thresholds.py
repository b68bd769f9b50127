"""Thresholds that decide whether a rewrite is profitable on the machine; the other files of this folder hold more.

Before: a pass that rewrites everything it can. After: ``if explicit_backward_is_profitable(...)``. The numbers come
from ``benchmarks/``, on a machine with AMX and on one with only bf16 dot products.
"""

from __future__ import annotations

import torch

from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.cpu import cpu_has_amx, cpu_has_bf16, multiplies_bf16

# Scores (queries times keys) per head up to which materializing them beats the CPU's flash backward.
MOST_SCORES = 512 * 512


def few_calls_are_profitable(device: str) -> bool:
    """Say whether one call for many small tensors beats one call for each.

    H200: the cast of a weight takes 2 us on the GPU and 16 to 24 us on the host; the casts are a quarter of the time
    of a GPT's token.
    """
    return device == "cuda"


# Bytes of casts below which they take no longer than the checks of their weights on the host: 0.1 ms of an H100.
LEAST_CAST = 1 << 28


def keeping_between_updates_is_profitable(device: str, casts: int, activations: int, arriving: int) -> bool:
    """Say whether copies of weights are kept between the micro-batches of an update.

    casts: bytes that the casts of a call move. activations: bytes that backward frees, a lower bound. arriving: bytes
    that the last gradients take as they arrive. CUDA, by estimates alone: a micro-batch of Llama 1B is 7 % casts, one
    of GPT-2 medium with 8 x 1,024 tokens 1.6 %. Where activations free less than arrives, copies that are alive at the
    end of backward would add to its peak.
    """
    return device == "cuda" and casts >= LEAST_CAST and arriving <= activations <= 4 * casts


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


# Bytes from which on glibc maps every block anew, whatever was freed before: the maximum of its threshold (mallopt(3)).
LEAST_MAPPED = 1 << 25
