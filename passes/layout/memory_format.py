"""Find operations that accept images in any layout, and values whose layout may change without visible effect.

Before: ``h = conv(x); h.relu_(); h.view(-1)``. After: ``conv`` and ``relu_`` keep a layout, ``view`` reads strides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.identify_ops import Operation, arguments_of, is_part, names_of, operations_of
from amp_graph.passes.graph.meta_keys import CAST, MARK, REGION
from amp_graph.passes.torch_compat.fake import concrete_size

CONVOLUTIONS = frozenset(
    {"aten.conv2d", "aten.conv_transpose2d", "aten.convolution", "aten._convolution", "aten._convolution_mode"}
)
# Operations that are not pointwise, have channels_last kernels, and return the layout of their input.
KEEP_LAYOUT = CONVOLUTIONS | {
    "aten.batch_norm", "aten.native_batch_norm", "aten.group_norm", "aten.native_group_norm",
    "aten.max_pool2d", "aten.avg_pool2d", "aten.adaptive_avg_pool2d", "aten.adaptive_max_pool2d", "aten.cat",
    "aten.concat", "aten.pad", "aten.constant_pad_nd", "aten.reflection_pad2d", "aten.replication_pad2d",
    "aten.pixel_shuffle", "aten.pixel_unshuffle",
    "aten.upsample_nearest2d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten._upsample_nearest_exact2d",
    "aten.hardswish", "aten.hardswish_", "aten.prelu", "amp_graph.activation_by_table",
}  # fmt: skip
# Those whose kernels handle any strides, like pointwise ones, and do not need dense images.
ANY_STRIDES = frozenset({"aten.cat", "aten.concat"})
# Views of some or all elements that keep the order of dimensions.
PARTS = frozenset({
    "aten.slice", "aten.alias", "aten.narrow", "aten.chunk", "aten.split", "aten.split_with_sizes", "aten.tensor_split",
})  # fmt: skip
AVERAGES = frozenset({"aten.mean", "aten.adaptive_avg_pool2d"})
PLACES = {2, 3}


@dataclass(frozen=True)
class Layouts:
    """``pinned``: the storages whose layout must not change, as other operations or the caller can observe it.

    ``parts``: views that may become views of channels_last images, as all their readers accept any layout.
    """

    pinned: frozenset[int]
    memory: Memory
    parts: frozenset[Node] = frozenset()

    @staticmethod
    def of(gm: GraphModule, memory: Memory) -> Layouts:
        """Compute both as a fixed point: pinned storages remove views, and fewer views pin more storages."""
        parts = frozenset(n for n in gm.graph.nodes if _shows_a_part(n))
        while True:
            found = Layouts(_pinned(gm, memory, parts), memory, parts)
            parts = frozenset(n for n in parts if found._may_show_a_part(n))
            if parts == found.parts:
                return found

    def _may_show_a_part(self, node: Node) -> bool:
        """Say whether a view's storage is not pinned, and all its readers accept any layout."""
        if self.memory.storages.get(node, frozenset()) & self.pinned:
            return False
        shown = not is_part(node) or node.all_input_nodes[0] in self.parts
        return shown and all(u in self.parts or self.may_convert(u) or averages_places(u) for u in node.users)

    def may_convert(self, node: Node) -> bool:
        """Say whether the images that ``node`` reads and returns may change from contiguous to channels_last."""
        found = value(node)
        if not _any_layout(node) or not isinstance(found, torch.Tensor) or found.dim() != 4:
            return False
        keys = set(self.memory.storages.get(node, ()))
        return not keys & self.pinned and _is_contiguous(captured(node))


def _pinned(gm: GraphModule, memory: Memory, parts: frozenset[Node]) -> frozenset[int]:
    """Return storages that an operation which does not keep layouts writes, or aliases before a write.

    With a copy in another layout, the alias would miss the write.
    """
    written = set(memory.writers)
    pinned: set[int] = set()
    for node in gm.graph.nodes:
        keys = {k for s in node.all_input_nodes for k in memory.storages.get(s, ())} & written
        if keys and node not in parts and not _any_layout(node):
            mark = node.meta.get(MARK)
            writes = {k for s in getattr(mark, "written", ()) for k in memory.storages.get(s, ())}
            pinned |= keys & (writes | memory.written_after(node))
        if node.op in ("placeholder", "get_attr"):  # the caller can observe it
            pinned |= memory.storages.get(node, frozenset()) & written
    return frozenset(pinned)


def _shows_a_part(node: Node) -> bool:
    """Say whether ``node`` is a view of a part of images, a split into several views, or one of those."""
    if REGION in node.meta or len(node.all_input_nodes) != 1:
        return False
    shown = tensors(value(node))
    return all(t.dim() == 4 for t in shown) and bool(shown) and (keeps_layout(node, PARTS) or is_part(node))


def wants_dense(node: Node) -> bool:
    """Say whether an operation that accepts any layout is slow on images that are not dense."""
    return CAST not in node.meta and not all(_is_pointwise_or_in(ANY_STRIDES, o) for o in operations_of(node))


def keeps_layout(node: Node, names: Collection[str]) -> bool:
    """Say whether all operations of ``node`` are in ``names``."""
    found = names_of(node)
    return bool(found) and set(found) <= set(names)


def _any_layout(node: Node) -> bool:
    """Say whether ``node`` gives the same values for images of any layout."""
    if REGION in node.meta:
        return False
    if CAST in node.meta and node.op == "call_method":
        return True
    operations = operations_of(node)
    # Random numbers are drawn in memory order: another layout would assign them to other elements.
    known = all(_is_pointwise_or_in(KEEP_LAYOUT, o) and not node_info.is_random(o.op) for o in operations)
    return bool(operations) and known


def _is_pointwise_or_in(names: Collection[str], operation: Operation) -> bool:
    return torch.Tag.pointwise in operation.op.tags or operation.packet in names


def averages_places(node: Node) -> bool:
    """Say whether ``node`` averages images over height and width, which does not depend on the layout."""
    names = names_of(node)
    if len(names) != 1 or names[0] not in AVERAGES or REGION in node.meta or len(node.all_input_nodes) != 1:
        return False
    given, x = arguments_of(node), value(node.all_input_nodes[0])
    if given is None or not isinstance(x, torch.Tensor) or x.dim() != 4:
        return False
    if names[0] == "aten.mean":
        dims = given.get("dim")
        return isinstance(dims, (list, tuple)) and {d % 4 for d in dims} == PLACES
    size = given["output_size"]
    return size == 1 or (isinstance(size, (list, tuple)) and tuple(size) == (1, 1))


def is_image(val: Any) -> bool:
    """Say whether a value has four dimensions and more than one pixel and channel, so that its layout matters.

    The layout of an empty batch does not matter; it counts as contiguous in both, so no copy would change it.
    """
    if not isinstance(val, torch.Tensor) or val.dim() != 4:
        return False
    sizes = [concrete_size(n) for n in val.shape]
    return sizes[0] > 0 and sizes[1] > 1 and sizes[2] * sizes[3] > 1


def is_channels_last(val: Any) -> bool:
    """Say whether an image is dense with its channels innermost, without a guard on symbolic sizes."""
    return is_image(val) and _strides(val) == _dense(val, (0, 2, 3, 1))


def _is_contiguous(val: torch.Tensor) -> bool:
    return _strides(val) == _dense(val, tuple(range(val.dim())))


def _strides(val: torch.Tensor) -> list[int]:
    """Return the strides, with 0 for dimensions of size 1, whose stride has no meaning."""
    sizes = [concrete_size(n) for n in val.shape]
    return [0 if size == 1 else concrete_size(n) for size, n in zip(sizes, val.stride(), strict=True)]


def _dense(val: torch.Tensor, order: tuple[int, ...]) -> list[int]:
    """Return the strides of a dense tensor whose memory order is ``order``, outermost first."""
    found, step = [0] * val.dim(), 1
    for d in reversed(order):
        size = concrete_size(val.shape[d])
        found[d] = 0 if size == 1 else step
        step *= size
    return found
