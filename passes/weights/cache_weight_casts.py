"""Replace casts of parameters with reads of copies that are cached between calls.

Before: ``w = weight.bfloat16(); y = linear(x, w)``. After: ``w = weight_copy(weight); y = linear(x, w)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAST, TRANSFORM
from amp_graph.passes.layout.memory_format import is_channels_last, is_image
from amp_graph.passes.memory.ops_with_recomputed_inputs import original
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.profitability.call_thresholds import keeping_a_copy_is_profitable
from amp_graph.passes.registry import ONE_WEIGHT_GRADIENT, reads_cached_weight, traits_of
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.passes.weights import cast_cache
from amp_graph.passes.weights.cache_entry import LARGE
from amp_graph.passes.weights.cast_cache import WeightCopies


@dataclass(frozen=True)
class CacheWeightCasts(Pass):
    """Replaces ``weight.bfloat16()`` with ``weight_copy(weight)`` when ``weight`` is a parameter.

    Small weights that train are cast at each call. Law: the copy is cast anew when something has written to the
    parameter since. Exactness: bit-exact, gradients included. Only on the CPU: on GPUs weights are
    cast together, see ``batch_weight_casts.py``.
    """

    copies: WeightCopies
    training: bool = True
    name: ClassVar[str] = "cache-weight-casts"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every inserted cast of a parameter."""
        changes, skips = [], []
        for node, reason in casts_of_parameters(gm, self.copies.dtype):
            if node.kwargs or len(node.args) > 1 or value(node).device.type != "cpu":  # into another layout; elsewhere
                continue
            if reason:
                skips.append(Skip(node.name, f"no copy of this weight is kept: {reason}"))
                continue
            trained = self.training and is_trained(node)
            if not keeping_a_copy_is_profitable(concrete_size(value(node).numel()), trained, _products_with(node)):
                skips.append(Skip(node.name, "no copy of this weight is kept: a cast takes as long as a check of it"))
                continue
            node.op, node.target = "call_function", self.copies.read
            node.kwargs = _how_it_is_read(node)
            changes.append(Change(self.name, "kept", node.name, "cast once per update"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _products_with(cast: Node) -> int | None:
    """Return the multiplications of the largest linear that reads ``cast``; None if anything else does, or sizes vary.

    As its weight or as its bias.
    """
    most = 0
    for reader in cast.users:
        if names_of(reader) != ("aten.linear",) or cast in reader.args[:1]:
            return None
        sizes = (*value(reader).shape, value(reader.args[0]).shape[-1])  # type: ignore[arg-type]
        if any(type(size) is not int for size in sizes):
            return None
        most = max(most, prod(sizes))
    return most


def is_kept(node: Node) -> bool:
    """Say whether ``node`` reads a weight copy that is cached between calls."""
    of = getattr(node.target, "__module__", "")
    return of == cast_cache.__name__ or (reads_cached_weight(node.target) and CAST in node.meta)


def casts_of_parameters(gm: GraphModule, dtype: torch.dtype) -> Iterator[tuple[Node, str]]:
    """Yield each inserted cast of a parameter to ``dtype``, and why it must stay a cast, or ""."""
    memory = observe(gm, marks(gm))
    returned = {storage_key(t) for s in gm.graph.output_node().all_input_nodes for t in tensors(value(s))}
    for node in gm.graph.nodes:
        if _casts_parameter(node) and value(node).dtype == dtype:
            yield node, _refusal(node, memory, returned)


def _casts_parameter(node: Node) -> bool:
    source = node.args[0] if CAST in node.meta and node.op == "call_method" else None
    return isinstance(source, Node) and source.op == "placeholder" and isinstance(captured(source), torch.nn.Parameter)


def _refusal(node: Node, memory: Memory, returned: set[int | None]) -> str:
    """Return why a cast must stay a cast, or ""."""
    source = node.args[0]
    assert isinstance(source, Node), "asked of casts alone"
    if memory.is_written(source):
        return "the forward writes to it"
    if storage_key(value(node)) in returned:
        return "the forward returns it"
    if TRANSFORM in node.meta:
        return "inside a torch.func transform"
    return ""


def _how_it_is_read(cast: Node) -> dict[str, Any]:
    if not _is_read_once(cast):
        return {}
    (reader,) = cast.users
    weight = reader.args[1] if len(reader.args) > 1 else None
    large = isinstance(weight, Node) and value(weight).numel() >= LARGE  # a small gradient is as cheap to cast
    by_reader = traits_of(original(reader.target)).fp32_weight_gradient  # with the weight's gradient, the bias's
    if large and by_reader and not _is_tied(cast):
        return {"once": True, "wide": True}
    if not large or cast is not weight:
        return {"once": True}
    return {"once": True, "last": True} if _convolves_last(reader) else {"once": True}


def _is_tied(cast: Node) -> bool:
    """Say whether autograd adds another gradient to that of the parameter, as of an embedding with the head's table.

    It adds in place to memory that one tensor has. What ``borrow`` passes on is a view of the gradient that arrived.
    """
    (weight,) = cast.args
    assert isinstance(weight, Node), "a cast has an input"
    return sum(bool(tensors(value(reader))) for reader in weight.users) > 1


def _convolves_last(reader: Node) -> bool:
    """Say whether ``reader`` is a trained channels_last convolution, whose kernels use that layout for weights too."""
    if names_of(reader) != ("aten.conv2d",) or not is_trained(reader):
        return False
    return is_image(value(reader.args[0])) and is_channels_last(value(reader.args[0]))  # type: ignore[arg-type]


def _is_read_once(cast: Node) -> bool:
    """Say whether a single operation reads ``cast``, and returns a single gradient for it."""
    found: list[Node] = []
    for reader in cast.users:
        map_arg((reader.args, reader.kwargs), found.append)
        if not names_of(reader) or not ONE_WEIGHT_GRADIENT.issuperset(names_of(reader)):
            return False
    return found.count(cast) == 1
