"""Fold batch norms into the convolutions before them, with what follows, in frozen models.

Before: ``h = batch_norm(conv2d(x, frozen_weight(w)), ...); h += s; y = relu(h)``.
After: ``y = convolution_with_norm(x, w, ..., other=s)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.inference.folded_conv import Shape, convolution_with_norm_of
from amp_graph.passes.base import Change, Pass, Writes
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.call_arguments import BATCH_NORM_ARGUMENTS, batch_norm_arguments
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import may_record_gradients
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.match import one_reader, summand
from amp_graph.passes.graph.meta_keys import IDENTITY, REGION
from amp_graph.passes.graph.node_info import calls_torch, schema_arguments
from amp_graph.passes.layout.conv_args import SCHEMA, pair
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from amp_graph.passes.torch_compat.fake import alike

AFTER: dict[tuple[str, ...], str] = {
    (f"aten.{name}{in_place}",): name for name in ("relu", "silu", "hardswish") for in_place in ("", "_")
}


@dataclass
class Chain:
    """A convolution, its norm, and what is folded with them, in order; ``other`` is the summand."""

    nodes: list[Node]
    weight: Node
    vectors: tuple[Any, ...]
    shape: Shape
    other: Node | None = None

    @property
    def x(self) -> Node:
        """The images."""
        return self.nodes[0].all_input_nodes[0]


@dataclass(frozen=True)
class FoldBatchNorms(Pass):
    """Replaces ``relu(batch_norm(conv2d(x, w)) + s)``, a part of it, or a silu or hardswish, with one convolution.

    Law: a frozen model in evaluation, channels_last images, given statistics; nothing else reads the intermediate
    values. The sum over products, the norm, the sum with ``s`` and the relu, or a silu or hardswish if nothing is
    added, are one kernel that rounds once; the weight is rounded after scaling. If ``s`` is such a result itself, and
    nothing reads it later, the sum is written over it. Exactness: approximate, no more roundings than before, of other
    values.
    """

    options: PipelineOptions
    writes: ClassVar[Writes] = Writes.ABSORBED

    def rewrite(self, gm: GraphModule) -> Iterator[Change]:
        """Visit every batch norm."""
        if may_record_gradients(gm):
            return
        memory = observe(gm, marks(gm))
        call = convolution_with_norm_of(self.options.frozen)
        for node in list(gm.graph.nodes):
            found = self._chain(node, memory)
            if found is not None:
                yield _replace(gm, found, call)
        for node in gm.graph.find_nodes(op="call_function", target=call):
            if len(node.args) == 5 and _is_last_reader(node, node.args[4]):
                node.args = (*node.args, True)
                yield Change(self.name, "sum in place", node.name, "nothing else reads what it adds to")

    def _chain(self, norm: Node, memory: Memory) -> Chain | None:
        found = self._folded(norm)
        if found is None or any(memory.is_written(v) for v in found.vectors if isinstance(v, Node)):
            return None
        total = one_reader(norm)
        other = summand(total, norm) if total is not None and REGION not in total.meta else None
        # The kernel with a sum does not support groups.
        if total is not None and other is not None and found.shape.groups == 1 and other not in found.nodes:
            if isinstance(value(other), torch.Tensor) and alike(value(other), value(norm)):
                found.nodes.append(total)
                found.other = other
        activation = one_reader(found.nodes[-1])
        after = None if activation is None or REGION in activation.meta else AFTER.get(names_of(activation))
        if activation is not None and after is not None:
            found.nodes.append(activation)
            found.shape = found.shape._replace(after=after)
        return found if _reads_are_the_same(found, memory) else None

    def _folded(self, norm: Node) -> Chain | None:
        """Return a norm in evaluation with the convolution before it; None if ``norm`` has none."""
        if names_of(norm) != ("aten.batch_norm",) or norm.target is not F.batch_norm or REGION in norm.meta:
            return None
        told = batch_norm_arguments(norm)
        conv, mean, var, gamma, beta, training, _, eps = (told[name] for name in BATCH_NORM_ARGUMENTS)
        if training is not False or not isinstance(conv, Node) or len(conv.users) != 1 or REGION in conv.meta:
            return None
        if names_of(conv) != ("aten.conv2d",) or not calls_torch(conv) or not is_channels_last(value(norm)):
            return None
        given = schema_arguments(SCHEMA, conv.args, dict(conv.kwargs))
        x, weight, bias = (given[name] for name in ("input", "weight", "bias"))
        if isinstance(given["padding"], str) or not self._is_frozen(weight) or not is_channels_last(value(x)):
            return None
        if bias is not None and not self._is_frozen(bias):
            return None
        low = value(weight).dtype
        if value(norm).dtype != low or value(x).dtype != low or not folding_is_profitable(value(x).device.type, low):
            return None
        vectors = (None if bias is None else bias.args[0], mean, var, gamma, beta)
        if not all(v is None or isinstance(v, Node) for v in vectors) or mean is None or var is None:
            return None
        stride, padding, dilation = (pair(given[name]) for name in ("stride", "padding", "dilation"))
        shape = Shape(stride, padding, dilation, given["groups"], eps, after="none")
        return Chain([conv, norm], weight.args[0], vectors, shape)

    def _is_frozen(self, node: Any) -> bool:
        return isinstance(node, Node) and node.target is self.options.frozen.read


def _reads_are_the_same(chain: Chain, memory: Memory) -> bool:
    """Say whether what the first nodes read is still unwritten when the last one runs."""
    last = chain.nodes[-1]
    reads = [(chain.x, chain.nodes[0]), *([(chain.other, chain.nodes[2])] if chain.other is not None else [])]
    return all(memory.epoch(source, reader) == memory.epoch(source, last) for source, reader in reads)


def _is_last_reader(node: Node, other: Node) -> bool:
    """Say whether ``node`` may overwrite ``other``: the result of a similar call, read only by earlier ones."""
    readers = [user for user in other.users if user is not node]
    ours = all(n.op == "call_function" and n.target is node.target for n in (other, *readers))
    return ours and other is not node.args[0] and all(user < node for user in readers)


def _replace(gm: GraphModule, chain: Chain, call: Any) -> Change:
    last, casts = chain.nodes[-1], [n for n in chain.nodes[0].all_input_nodes[1:]]
    args: tuple[Any, ...] = (chain.x, chain.weight, chain.vectors, tuple(chain.shape)) + (
        (chain.other,) if chain.other is not None else ()
    )
    with gm.graph.inserting_before(last):
        made = gm.graph.call_function(call, args)
    made.meta = {k: v for k, v in last.meta.items() if k != IDENTITY}
    last.replace_all_uses_with(made)
    for node in (*reversed(chain.nodes), *casts):
        if not node.users:
            gm.graph.erase_node(node)
    return Change("fold-batch-norms", "folded", made.name, "of " + ", ".join(n.name for n in chain.nodes))


def folding_is_profitable(device: str, dtype: torch.dtype) -> bool:
    """Say whether a batch norm in eval mode should be folded into its convolution on ``device``.

    bf16 on CPU with dot products: the norm and the relu after a convolution take 5 % (3x3, 128 channels) to 60 % (1x1,
    256 channels) of its time. With folded norms, a ResNet-50 takes 0.7 to 0.8 of the time.
    """
    return device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()
