"""torch's structured trace (``TORCH_TRACE``), which tlparse reads: texts that belong to a compilation.

Before: a text. After: an artifact of that name, beside Dynamo's own graphs. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def add_artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Add ``text``, which is made only if a trace is written; ``encoding``: "string" or "json"."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=text,
        expect_trace_id=False,  # a graph that was captured by torch.export or symbolic_trace has none
    )
