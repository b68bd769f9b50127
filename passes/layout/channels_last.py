"""Keep the images of a convolutional network in channels_last from its first convolution to its last.

Before: ``conv2d(x, w)`` on contiguous tensors. After: ``conv2d(x.contiguous(memory_format=channels_last), w)``; later
operations keep that layout. Operations that depend on the layout get a contiguous tensor, as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.edit import place_like, set_value
from amp_graph.passes.graph.fake_values import captured, fake_mode_of, keep_trained, run_node, value
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, MARK, REGION
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.layout.memory_format import (
    CONVOLUTIONS,
    Layouts,
    averages_places,
    is_channels_last,
    is_image,
    keeps_layout,
    wants_dense,
)
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from amp_graph.passes.torch_compat.fake import FakeTensorMode

FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Replaces the contiguous input of convolutions by a channels_last one where it is profitable.

    Law: only layouts change. Operations that accept any layout propagate it. Every other reader, except averages over
    all pixels, gets a contiguous copy, and so do the graph's outputs. Skipped: graphs whose convolutions read
    channels_last tensors already. Exactness: rounding-equal, kernels sum in another order.
    """

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Walk the graph once, in order: convert the inputs of convolutions, and convert back for other readers."""
        mode = fake_mode_of(gm)
        convolutions = [n for n in gm.graph.nodes if _is_convolution(n)]
        if mode is None or not convolutions:
            return
        first = value(convolutions[0])
        if any(is_channels_last(value(source)) for n in convolutions for source in n.all_input_nodes[:1]):
            yield Skip(convolutions[0].name, "the model has channels_last images already")
            return
        if not channels_last_is_profitable(first.device.type, first.dtype, len(convolutions)):
            yield Skip(convolutions[0].name, f"not profitable for {first.dtype} here")
            return
        memory = observe(gm, marks(gm))
        work = _Conversion(gm, mode, memory, Layouts.of(gm, memory))
        for node in list(gm.graph.nodes):
            if node.op != "placeholder":
                work.visit(node)
        yield from work.changes


@dataclass
class _Conversion:
    """The state of the walk: the values that are channels_last so far, and the copies inserted."""

    gm: GraphModule
    mode: FakeTensorMode
    memory: Memory
    layouts: Layouts
    last: set[Node] = field(default_factory=set)
    # With one channel both layouts are the same memory, and a convolution returns contiguous images. Their first reader
    # converts them, not the next convolution: values saved in between would be kept in both layouts.
    late: set[Node] = field(default_factory=set)
    # Views of a part of channels_last images: readers that need dense images get a copy.
    parts: set[Node] = field(default_factory=set)
    copies: dict[Any, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        if node in self.layouts.parts:
            self._show(node)
            return
        sources = [s for s in dict.fromkeys(node.all_input_nodes) if isinstance(value(s), torch.Tensor)]
        begins = _is_convolution(node) or any(self._has_channels_innermost(s) or s in self.late for s in sources)
        converts = self._passes_on(node) and begins
        for source in sources:
            if converts and source not in self.last and self._joins(node, source):
                self._give(node, source, True)
            elif (
                not (converts or averages_places(node))
                and self._has_channels_innermost(source)
                and is_image(value(source))
            ):
                self._give(node, source, False)
        if converts:
            set_value(node, run_node(node, self.mode))  # from the current layouts of its inputs
            arrived = is_channels_last(value(node)) or not is_image(value(node))
            (self.last if arrived else self.late).add(node)

    def _show(self, node: Node) -> None:
        """Update a view of a part of an image that is channels_last now."""
        if self._has_channels_innermost(node.all_input_nodes[0]):
            set_value(node, run_node(node, self.mode))
            (self.last if is_channels_last(value(node)) else self.parts).add(node)

    def _has_channels_innermost(self, source: Node) -> bool:
        """Say whether the channels of ``source`` are innermost now."""
        return source in self.last or source in self.parts

    def _passes_on(self, node: Node) -> bool:
        """Say whether ``node`` may run on channels_last images; not a cast whose readers all depend on strides."""
        if CAST in node.meta and not any(self.layouts.may_convert(u) or averages_places(u) for u in node.users):
            return False
        return self.layouts.may_convert(node)

    def _joins(self, node: Node, source: Node) -> bool:
        """Say whether ``node`` is faster if ``source`` is channels_last; weights only where kernels need it."""
        if keeps_layout(node, CONVOLUTIONS) and source is not node.all_input_nodes[0]:
            alone = CAST in source.meta and len(source.users) == 1
            return alone and value(source).dim() == 4 and channels_last_weights_are_profitable(value(node).device.type)
        if source in self.parts and not wants_dense(node):
            return False
        is_written = source in getattr(node.meta.get(MARK), "written", ())  # by ``node``, which a copy would hide
        return is_image(value(source)) and not is_written

    def _give(self, node: Node, source: Node, channels_last: bool) -> None:
        """Make ``node`` read ``source`` in the other layout; a copy is shared until its storage is written."""
        key = (source, channels_last, self.memory.epoch(source, node) if source in self.memory.order else 0)
        if key not in self.copies:
            self.copies[key] = self._copied(node, source, channels_last)
        node.replace_input_with(source, self.copies[key])

    def _copied(self, node: Node, source: Node, channels_last: bool) -> Node:
        options: dict[str, Any] = {"memory_format": FORMATS[channels_last]}
        what = "to channels_last" if channels_last else "back to contiguous"
        self.changes.append(Change("channels-last", what, source.name, f"for {node.name}"))
        casts = channels_last and CAST in source.meta and source.op == "call_method" and len(source.users) == 1
        is_weight = source is not node.all_input_nodes[0]
        if casts and (is_weight or casting_into_layout_is_profitable(value(source).device.type)):
            # A cast writes a copy anyway: make it write this layout.
            source.target, source.args, source.kwargs = "to", (source.args[0], value(source).dtype), options
            set_value(source, run_node(source, self.mode))
            return source
        with self.gm.graph.inserting_before(node):
            made = self.gm.graph.call_method("contiguous", (source,), options)
        found = run_node(made, self.mode)
        keep_trained(found, captured(source))
        return place_like(made, source, found, (CHECKPOINT,))


def _is_convolution(node: Node) -> bool:
    low = isinstance(value(node), torch.Tensor) and value(node).dtype.itemsize == 2
    return low and keeps_layout(node, CONVOLUTIONS) and REGION not in node.meta and is_image(value(node))


# One convolution alone does not recover the cost of a layout change before and after it.
FEWEST_CONVOLUTIONS = 2


def channels_last_is_profitable(device: str, dtype: torch.dtype, convolutions: int) -> bool:
    """Say whether a graph with so many ``convolutions`` of ``dtype`` runs faster in channels_last on ``device``.

    bf16 on CPU: torch's norms and poolings are up to 15 times slower on contiguous images than on channels_last ones,
    convolutions up to 8 times (1x1, AMX). ResNet-50 and a U-Net: autocast on channels_last takes 0.7 to 0.97 of the
    time. CUDA, low precision: tensor cores read channels_last, and cuDNN transposes other images before and after each
    convolution. On an H200, autocast on channels_last took 0.82 to 1.0 of the time (ResNet-50, U-Net, training and
    inference, eager and compiled).
    """
    if convolutions < FEWEST_CONVOLUTIONS:
        return False
    if device == "cuda":
        return dtype in HALVES
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()


def channels_last_weights_are_profitable(device: str) -> bool:
    """Say whether a convolution's weight should be cast into channels_last: else cuDNN transposes it in each call.

    oneDNN reorders weights into its own layout in any case.
    """
    return device == "cuda"


def casting_into_layout_is_profitable(device: str) -> bool:
    """Say whether one copy into another dtype and into channels_last is faster than two separate copies.

    On the CPU it takes 1.7 to 2.2 times as long for more than one channel: torch's fast transposing copy needs equal
    dtypes. Elsewhere it reads and writes half as much.
    """
    return device != "cpu"
