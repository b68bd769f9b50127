"""Cast weights that train: once a forward, for all readers, with gradients that are cast back in one pass.

Before: ``w = weight.bfloat16(); y = conv2d(x, w)``.
After: ``w = cast_weight(weight, torch.bfloat16, channels_last=True); y = conv2d(x, w)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAST, TRANSFORM
from amp_graph.passes.layout.memory_format import is_channels_last, is_image
from amp_graph.passes.memory.ops_with_recomputed_inputs import original
from amp_graph.passes.native import cast_kernel
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.registry import ONE_WEIGHT_GRADIENT, own_functions, traits_of
from amp_graph.passes.torch_compat.autograd import borrow
from amp_graph.passes.torch_compat.dispatch import is_batched, is_in_mode
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.storage import exchange_memory, storage_key

own_functions(__name__)
LARGE = 131_072  # elements: below, torch's cast and that of its gradient take no longer than our function


@dataclass(frozen=True)
class CastWeights(Pass):
    """Replaces ``weight.bfloat16()`` of a large weight that trains with ``cast_weight(weight, torch.bfloat16)``.

    Law: the same cast, in the layout that a channels_last convolution reads; nothing is cast in backward where the
    only reader returns an fp32 gradient. Only on the CPU. Exactness: bit-exact, gradients included.
    """

    options: PipelineOptions
    name: ClassVar[str] = "cast-weights"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every inserted cast of a parameter."""
        changes = []
        for node, reason in casts_of_parameters(gm, self.options.dtype):
            if reason or node.kwargs or len(node.args) > 1 or value(node).device.type != "cpu" or not is_trained(node):
                continue
            if concrete_size(value(node).numel()) >= LARGE or _has_places(value(node)):
                node.op, node.target = "call_function", cast_weight
                node.args, node.kwargs = (node.args[0], self.options.dtype), _how_it_is_read(node)
                told = ", ".join(node.kwargs) or "its gradient in one pass"
                changes.append(Change(self.name, "cast by amp_graph", node.name, told))
        return PassResult(gm, tuple(changes))


def casts_of_parameters(gm: GraphModule, dtype: torch.dtype) -> Iterator[tuple[Node, str]]:
    """Yield each inserted cast of a parameter to ``dtype``, and why it must stay a plain cast, or ""."""
    memory = observe(gm, marks(gm))
    returned = {storage_key(t) for s in gm.graph.output_node().all_input_nodes for t in tensors(value(s))}
    for node in list(gm.graph.nodes):
        if casts_weight(node) and value(node).dtype == dtype:
            yield node, _refusal(node, memory, returned)


def casts_weight(node: Node) -> bool:
    """Say whether ``node`` is an inserted cast of a parameter."""
    source = node.args[0] if CAST in node.meta and node.op == "call_method" else None
    return isinstance(source, Node) and source.op == "placeholder" and isinstance(captured(source), torch.nn.Parameter)


def _refusal(node: Node, memory: Memory, returned: set[int | None]) -> str:
    source = node.args[0]
    assert isinstance(source, Node), "asked of casts alone"
    if memory.is_written(source):
        return "the forward writes to it"
    if storage_key(value(node)) in returned:
        return "the forward returns it"
    return "inside a torch.func transform" if TRANSFORM in node.meta else ""


def _has_places(weight: Tensor) -> bool:
    """Say whether a convolution's weight is large enough for a layout and a gradient of another layout."""
    return weight.dim() == 4 and weight[0, 0].numel() > 1 and weight.numel() >= cast_kernel.LARGE_OF_PLACES


def _how_it_is_read(cast: Node) -> dict[str, Any]:
    """Return the options of ``cast_weight``, which depend on the only reader."""
    if not _is_read_once(cast) or concrete_size(value(cast).numel()) < LARGE:
        return {}
    (reader,) = cast.users
    by_reader = traits_of(original(reader.target)).fp32_weight_gradient  # with the weight's gradient, the bias's
    if by_reader and not _is_tied(cast):
        return {"fp32_gradient": True}
    is_weight = len(reader.args) > 1 and reader.args[1] is cast
    return {"channels_last": True} if is_weight and _convolves_channels_last(reader) else {}


def _is_tied(cast: Node) -> bool:
    """Say whether autograd adds another gradient to that of the parameter, as of an embedding with the head's table.

    It adds in place to memory that one tensor has. What ``borrow`` passes on is a view of the gradient that arrived.
    """
    (weight,) = cast.all_input_nodes
    return sum(bool(tensors(value(reader))) for reader in weight.users) > 1


def _convolves_channels_last(reader: Node) -> bool:
    if names_of(reader) != ("aten.conv2d",) or not is_trained(reader):
        return False
    images: Any = value(reader.args[0])  # type: ignore[arg-type]
    return is_image(images) and is_channels_last(images)


def _is_read_once(cast: Node) -> bool:
    """Say whether a single operation reads ``cast``, and returns a single gradient for it."""
    found: list[Node] = []
    for reader in cast.users:
        map_arg((reader.args, reader.kwargs), found.append)
        if not names_of(reader) or not ONE_WEIGHT_GRADIENT.issuperset(names_of(reader)):
            return False
    return found.count(cast) == 1


def cast_weight(weight: Tensor, dtype: torch.dtype, fp32_gradient: bool = False, channels_last: bool = False) -> Tensor:
    """``weight.to(dtype)``, channels_last if asked; ``fp32_gradient``: the reader's gradient is fp32 already.

    The cast of a large gradient is compiled C, where there is a compiler, and the tensor that it returns is no view:
    autograd can add other gradients of ``weight`` to it in place.
    """
    layout = torch.channels_last if channels_last else torch.preserve_format
    plain = type(weight) is not torch.nn.Parameter or not weight.is_leaf or is_in_mode(weight)
    if plain or not weight.requires_grad or not torch.is_grad_enabled():
        return weight.to(dtype, memory_format=layout)
    low = weight.detach().to(dtype, memory_format=layout)
    if fp32_gradient:
        return borrow(weight, low)
    found: Tensor = _Cast.apply(weight, [low])
    return found


class _Cast(torch.autograd.Function):
    """Saves nothing, so it serves any number of backward passes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: list[Tensor]) -> Tensor:
        ctx.weight = weight  # for its layout only
        given = low[0].new_empty(0)
        exchange_memory(given, low[0])  # not a view, and with a version counter of its own
        return given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() or is_batched(grad):  # create_graph=True, is_grads_batched=True
            return grad.float(), None
        return cast_kernel.widened(grad, ctx.weight), None
