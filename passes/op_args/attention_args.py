"""Read and write the arguments of ``F.scaled_dot_product_attention``.

Before: ``scaled_dot_product_attention(q, k, v, None, 0.0, True)``. After: ``{"query": q, ..., "is_causal": True}``, and
``keywords_of`` of that, ``{"is_causal": True}``.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_graph.passes.graph import node_info

SDPA = torch.ops.aten.scaled_dot_product_attention.default
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def keywords_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an attention call that differ from the defaults."""
    defaults = node_info.schema_arguments(SDPA, (None,) * 3, {})
    return {name: given[name] for name in NAMES[3:] if given[name] is not None and given[name] != defaults[name]}
