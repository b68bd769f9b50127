"""Attention of bf16 in compiled C of ours, against torch's kernel.

First the calls alone, by batch, heads, tokens, width and direction, with one query, and without gradients. Then whole
models with and without the passes. Ratios of process CPU times of interleaved rounds, ours to the others': below 1 ours
is faster [quartiles].

    python benchmarks/attention.py [--models vit,gpt,bert_sdpa,bert_eager] [--scale 0.5] [--rounds 15] [--skip-pieces]
"""

import time

import torch
from interleaved import interleaved, spread
from passes_in_models import compare

from amp_graph.passes.backends.cpu.attention import attention_kernel

WITHOUT = ",skip=attention|fuse_attention"
# batch, heads, queries, keys, width, causal
SIZES = (
    (4, 12, 16, 16, 64, False),
    (4, 12, 64, 64, 64, False),
    (4, 12, 128, 128, 64, False),
    (4, 6, 197, 197, 64, False),
    (2, 12, 256, 256, 64, True),
    (2, 12, 512, 512, 64, True),
    (2, 8, 1024, 1024, 64, False),
    (1, 8, 2048, 2048, 128, True),
    (1, 12, 1, 64, 64, False),
    (1, 12, 1, 1024, 64, False),
)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def pieces(rounds: int) -> None:
    """Print a line for each size."""
    for batch, heads, queries, keys, width, causal in SIZES:
        torch.manual_seed(0)
        q, k, v, grad = (
            torch.randn(batch, n, heads, width).bfloat16().transpose(1, 2) for n in (queries, keys, keys, queries)
        )
        out, sums = FLASH(q, k, v, 0.0, causal)
        given = (q, k, v, None, causal, width**-0.5)
        forward = {
            "ours": lambda given=given: attention_kernel.forward(*given),
            "kernel": lambda q=q, k=k, v=v, causal=causal: FLASH(q, k, v, 0.0, causal),
        }
        saved = (grad, q, k, v, out, sums, 0.0, causal)
        backward = {
            "ours": lambda given=given, grad=grad: attention_kernel.backward(grad, *given),
            "kernel": lambda saved=saved: FLASH_BACKWARD(*saved),
        }
        told = []
        for name, calls in (("forward", forward), ("backward", backward)):
            if queries == 1 and name == "backward":
                continue
            seconds = interleaved(calls, rounds, time.process_time, least=2e-3)
            told += [f"{name}, of {o}'s {spread(seconds['ours'], seconds[o])}" for o in calls if o != "ours"]
        sizes = f"{batch} x {heads} x {queries} x {keys} x {width}{', causal' if causal else ''}"
        print(f"{sizes}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    compare(__doc__, 15, "vit,gpt,bert_sdpa,bert_eager", WITHOUT, pieces)
