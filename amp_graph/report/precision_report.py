"""Lines of a report on planned precision that did not survive: what ran in another one, and what TF32 may round.

Before: a plan. After: ``precision: graph 0: linear: mm ran in f32, planned bf16``; nothing where all went as planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import Node

from amp_graph.capture.conversion import Conversion
from amp_graph.devices import device_of
from amp_graph.lists import OpClass
from amp_graph.passes.casts.product_precision import CONV, kind_of, lost_in, planned
from amp_graph.passes.graph.identify_ops import Identity
from amp_graph.passes.graph.meta_keys import IDENTITY, LOST, MARK
from amp_graph.passes.torch_compat.devices import fp32_precision
from amp_graph.report.graph_parts import mark_of, parts_of
from amp_graph.rewrite import Rewritten

MOST = 5  # lines of a graph
SETTINGS = {"cuda": ("cuda.matmul", "cudnn.conv"), "cpu": ("mkldnn.matmul", "mkldnn.conv")}


def precision_lines(found: Conversion) -> Iterator[str]:
    """Yield a line for each product of a converted model that does not run in the precision planned for it."""
    replays = found.captured.replays
    for i, graph in enumerate(found.graphs):
        gm = graph.rewritten.gm
        seen = dict.fromkeys(lost for part in parts_of(graph.rewritten) for lost in lost_in(part.gm))
        seen |= dict.fromkeys(gm.meta.get(LOST, ()))
        seen |= {} if replays is None else dict.fromkeys(replays.lost(gm))
        lines = [*_cut(list(map(str, seen))), *_rounded(graph.rewritten)]
        yield from (f"precision: graph {i}: {line}" for line in lines)


def _cut(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST else [*lines[:MOST], f"and {len(lines) - MOST} more products"]


def _rounded(rewritten: Rewritten) -> Iterator[str]:
    """Yield a line for products that were kept in fp32, with a reason, where torch's settings let them be rounded."""
    device = device_of(rewritten.gm)
    kept = [(node, kind) for part in parts_of(rewritten) for node in part.gm.graph.nodes if (kind := _kept_full(node))]
    for kind, count in Counter(kind for _, kind in kept).items():
        ran = fp32_precision(device, "conv" if kind == CONV else "matmul")
        if ran == "ieee":
            continue
        first = next(node for node, its_kind in kept if its_kind == kind)
        more = f" and {count - 1} more" if count > 1 else ""
        setting = SETTINGS[device][kind == CONV]
        yield (
            f"{first.name}{more}, kept in fp32 ({first.meta[MARK].reason}), may run in {ran} by torch's settings: "
            f"torch.backends.{setting}.fp32_precision = 'ieee' forbids it"
        )


def _kept_full(node: Node) -> str:
    """Return what kind of product a node computes that a list or the user keeps in fp32; "" for others."""
    mark, identity = mark_of(node), node.meta.get(IDENTITY)
    if mark is None or mark.cls != OpClass.DENY or planned(node) != torch.float32:
        return ""
    operations = identity.operations if isinstance(identity, Identity) else ()
    return next(filter(None, (kind_of(o.op) for o in operations)), "")
