"""Read and write the arguments of ``F.scaled_dot_product_attention``.

Before: ``scaled_dot_product_attention(q, k, v, None, 0.0, True)``. After: ``{"query": q, ..., "is_causal": True}``, and
``keywords_of`` of that, ``{"is_causal": True}``.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_graph.passes.graph import node_info
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16

SDPA = torch.ops.aten.scaled_dot_product_attention.default
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def keywords_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an attention call that differ from the defaults."""
    defaults = node_info.schema_arguments(SDPA, (None,) * 3, {})
    return {name: given[name] for name in NAMES[3:] if given[name] is not None and given[name] != defaults[name]}


def attention_kernel_is_profitable(device: str, dtype: torch.dtype, queries: int | None = None) -> bool:
    """Say whether our C attention kernels, forward and backward, beat torch's kernel.

    ``queries``: the number of queries if no gradients are needed, else None.

    Speedups, bf16 on CPU, one thread, 16 to 2,048 tokens, causal or not (``benchmarks/attention.py``). Dot products:
    forward 2.1 to 3.8 (one query: 5 to 7), backward 2 to 17, and 2.4 to 5 over torch's matmuls. AMX: forward 1.2 to 2.4
    (2 to 16 queries: 1.1 to 1.6, one: 0.5 to 0.8), backward 2 to 31, and 3.7 to 8 over matmuls.
    """
    return device == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() and (queries != 1 or not cpu_has_amx())
