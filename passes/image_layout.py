"""Which operations work on images in any layout, and which values may change theirs unseen.

Before: ``h = conv(x); h.relu_(); h.view(-1)``. After: ``conv`` and ``relu_`` pass a layout on, ``view`` reads strides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes import facts
from amp_graph.passes.identify_ops import OPS, Identity
from amp_graph.passes.insert_casts import CAST
from amp_graph.passes.memory import Memory
from amp_graph.passes.node_value import captured, value
from amp_graph.passes.plan_precision import MARK
from amp_graph.passes.regions import REGION
from amp_graph.passes.torch_private import concrete_size

CONVOLUTIONS = frozenset(
    {"aten.conv2d", "aten.conv_transpose2d", "aten.convolution", "aten._convolution", "aten._convolution_mode"}
)
# Operations that are not pointwise, have kernels for channels_last, and return what they are given.
KEEP_LAYOUT = CONVOLUTIONS | {
    "aten.batch_norm", "aten.native_batch_norm", "aten.group_norm", "aten.native_group_norm",
    "aten.max_pool2d", "aten.avg_pool2d", "aten.adaptive_avg_pool2d", "aten.adaptive_max_pool2d", "aten.cat",
    "aten.concat", "aten.pad", "aten.constant_pad_nd", "aten.reflection_pad2d", "aten.replication_pad2d",
    "aten.pixel_shuffle", "aten.pixel_unshuffle",
    "aten.upsample_nearest2d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten._upsample_nearest_exact2d",
    "aten.hardswish", "aten.hardswish_", "aten.prelu",
}  # fmt: skip


@dataclass(frozen=True)
class Layouts:
    """The storages whose layout is seen from outside of the operations that pass it on."""

    pinned: frozenset[int]
    memory: Memory

    @staticmethod
    def of(gm: GraphModule, memory: Memory) -> Layouts:
        """Find written storages that something else than a layout-keeping operation writes, or aliases.

        A copy in another layout would hide the write from it, or it from the write.
        """
        written = set(memory.writers)
        pinned: set[int] = set()
        for node in gm.graph.nodes:
            keys = {k for s in node.all_input_nodes for k in memory.storages.get(s, ())} & written
            if keys and not _any_layout(node):
                mark = node.meta.get(MARK)
                writes = {k for s in getattr(mark, "written", ()) for k in memory.storages.get(s, ())}
                pinned |= keys & (writes | memory.storages.get(node, frozenset()))
            if node.op in ("placeholder", "get_attr"):  # the caller holds it
                pinned |= memory.storages.get(node, frozenset()) & written
        return Layouts(frozenset(pinned), memory)

    def may_convert(self, node: Node) -> bool:
        """Say whether ``node`` may be given, and give, channels_last images where they were contiguous."""
        found = value(node)
        if not _any_layout(node) or not isinstance(found, torch.Tensor) or found.dim() != 4:
            return False
        keys = set(self.memory.storages.get(node, ()))
        return not keys & self.pinned and _is_contiguous(captured(node))

    def may_copy(self, source: Node, reader: Node) -> bool:
        """Say whether ``reader`` may be given a copy of ``source``: not where it writes to it."""
        mark = reader.meta.get(MARK)
        return source not in getattr(mark, "written", ())


def keeps_layout(node: Node, names: Collection[str]) -> bool:
    """Say whether all that ``node`` calls is in ``names``."""
    identity = node.meta.get(OPS)
    return isinstance(identity, Identity) and bool(identity.names) and set(identity.names) <= set(names)


def _any_layout(node: Node) -> bool:
    """Say whether ``node`` gives the same numbers, in the same places, for images of any layout."""
    if REGION in node.meta:
        return False
    if CAST in node.meta and node.op == "call_method":
        return True
    identity = node.meta.get(OPS)
    if not isinstance(identity, Identity) or not identity.operations:
        return False
    # Random numbers are drawn in the order of memory: another layout would give them to other elements.
    return all(
        (torch.Tag.pointwise in o.op.tags or str(o.op).rsplit(".", 1)[0] in KEEP_LAYOUT) and not facts.is_random(o.op)
        for o in identity.operations
    )


def is_image(val: Any) -> bool:
    """Say whether a value has four dimensions and more than one place and channel: its layout matters."""
    if not isinstance(val, torch.Tensor) or val.dim() != 4:
        return False
    sizes = [concrete_size(n) for n in val.shape]
    return sizes[1] > 1 and sizes[2] * sizes[3] > 1


def is_channels_last(val: Any) -> bool:
    """Say whether an image is dense with its channels innermost, without a guard on symbolic sizes."""
    return is_image(val) and _strides(val) == _dense(val, (0, 2, 3, 1))


def _is_contiguous(val: torch.Tensor) -> bool:
    return _strides(val) == _dense(val, tuple(range(val.dim())))


def _strides(val: torch.Tensor) -> list[int]:
    """Return the strides, 0 for sizes of 1, whose stride means nothing."""
    sizes = [concrete_size(n) for n in val.shape]
    return [0 if size == 1 else concrete_size(n) for size, n in zip(sizes, val.stride(), strict=True)]


def _dense(val: torch.Tensor, order: tuple[int, ...]) -> list[int]:
    """Return the strides of a dense tensor whose dimensions lie in ``order``, outermost first."""
    found, step = [0] * val.dim(), 1
    for d in reversed(order):
        size = concrete_size(val.shape[d])
        found[d] = 0 if size == 1 else step
        step *= size
    return found
