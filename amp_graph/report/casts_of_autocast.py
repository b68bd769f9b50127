"""The casts of ``torch.autocast`` in the graphs of a report, counted when the report is asked for.

Before: ``GraphReport(casts=(...), autocast=None)``. After: ``autocast=CastsUnderAutocast(7, 8)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from amp_graph.capture.captured_graphs import Captured
from amp_graph.devices import device_of
from amp_graph.passes.autocast_regions.casts_under_autocast import CastsUnderAutocast, casts_under_autocast
from amp_graph.passes.graph.node_info import clean_path
from amp_graph.report.records import GraphReport

Count = Callable[[], CastsUnderAutocast | None]


def count_of(record: Captured, weights: Collection[str]) -> Count:
    """Return what counts the casts in a graph; it holds neither the rewritten graph nor the model.

    ``weights``: the names of the model's parameters and buffers. Level O0 has no count.
    """
    made = record.rewritten
    if made.written is None:
        return _nothing
    is_weight = partial(_is_weight, weights)
    return partial(casts_under_autocast, made.written, device_of(made.gm), made.dtype, record.grad, is_weight)


def counted(graphs: Sequence[GraphReport], counts: Sequence[Count]) -> tuple[GraphReport, ...]:
    """Return ``graphs`` with the counts that their ``counts`` give."""
    return tuple(replace(graph, autocast=count()) for graph, count in zip(graphs, counts, strict=True))


def _nothing() -> None:
    return None


def _is_weight(weights: Collection[str], name: str, found: Any) -> bool:
    return isinstance(found, torch.nn.Parameter) or clean_path(name) in weights
