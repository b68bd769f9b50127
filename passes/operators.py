"""The operators of amp_graph: one library, and one way in which each is registered.

Before: a Python function that a tracer goes through. After: ``amp_graph::attention_backward``, one node of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("amp_graph", "DEF")
OPS: Any = torch.ops.amp_graph


def define_operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``amp_graph::<schema>``, which runs ``function`` on every device and ``fake`` on fake tensors."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_graph::{name}", fake, lib=LIBRARY)
