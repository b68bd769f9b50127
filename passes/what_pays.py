"""Where a rewrite pays, by what the machine can do: the one place that says so.

Before: a pass that rewrites what it can. After: ``if explicit_backward_pays(...)``. The figures are those of
``benchmarks/``; a machine with matrix units (AMX) and one with bf16 dot products only were measured.
"""

from __future__ import annotations

import torch

from amp_graph.passes.torch_private import multiplies_bf16

# Products of queries and keys of one head up to which materializing them beats the CPU's flash backward.
MOST_SCORES = 512 * 512


def explicit_backward_pays(device: str, dtype: torch.dtype, queries: int, keys: int) -> bool:
    """Say whether attention's backward by matrix products beats torch's kernel on ``device``.

    bf16 on CPU: forward and backward take 0.5-0.8 of the kernel's time at 128 to 256 tokens with bf16 dot products,
    and about 0.3 with matrix units, whose products the kernel's backward does not reach; at 1,024 they lose.
    """
    return device == "cpu" and dtype == torch.bfloat16 and queries * keys <= MOST_SCORES and multiplies_bf16()
