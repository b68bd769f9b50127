"""Casts of weights that are no plain casts: with a gradient in fp32 as a kernel made it, or hoisted out of the graph.

Before: ``w = weight.bfloat16(); y = linear_low(x, w)``: the gradient is rounded to bf16, and cast.
After: ``w = cast_weight(weight, torch.bfloat16); y = linear_low(x, w)``. In a step, ``w`` becomes an input: a copy that
the update writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, TRANSFORM
from amp_graph.passes.memory.ops_with_recomputed_inputs import original
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.registry import own_functions, traits_of
from amp_graph.passes.torch_compat.autograd import borrow
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.storage import storage_key

own_functions(__name__)


@dataclass(frozen=True)
class CastWeights(Pass):
    """Replaces ``weight.bfloat16()`` with ``cast_weight(weight, torch.bfloat16)`` where one kernel of ours reads it.

    Law: the reader returns the gradient cast to fp32 where the CPU has matrix units, and nothing else adds to the
    parameter's. Exactness: bit-exact, gradients included.
    """

    options: PipelineOptions
    name: ClassVar[str] = "cast-weights"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every inserted cast of a parameter."""
        changes = []
        for node, reason in casts_of_parameters(gm, self.options.dtype):
            plain = reason or node.kwargs or len(node.args) > 1 or value(node).device.type != "cpu"
            if not plain and is_trained(node) and _has_fp32_gradient(node):
                node.op, node.target, node.args = "call_function", cast_weight, (node.args[0], self.options.dtype)
                changes.append(Change(self.name, "fp32 gradient", node.name, "its reader's"))
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


def _has_fp32_gradient(cast: Node) -> bool:
    """Say whether a single operation reads ``cast``, once, and may return its gradient in fp32."""
    if len(cast.users) != 1:  # none, where an operation of two dtypes was left as written
        return False
    (reader,) = cast.users
    found: list[Node] = []
    map_arg((reader.args, reader.kwargs), found.append)
    by_reader = traits_of(original(reader.target)).fp32_weight_gradient  # with the weight's gradient, the bias's
    return by_reader and found.count(cast) == 1 and not _is_tied(cast)


def _is_tied(cast: Node) -> bool:
    """Say whether autograd adds another gradient to that of the parameter, as of an embedding with the head's table.

    It adds in place to memory that one tensor has. What ``borrow`` passes on is a view of the gradient that arrived.
    """
    (weight,) = cast.all_input_nodes
    return sum(bool(tensors(value(reader))) for reader in weight.users) > 1


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight.to(dtype)``, whose reader may return its gradient in fp32."""
    plain = type(weight) is not torch.nn.Parameter or not weight.is_leaf or is_in_mode(weight)
    if plain or not weight.requires_grad or not torch.is_grad_enabled():
        return weight.to(dtype)
    return borrow(weight, weight.detach().to(dtype))


@dataclass(frozen=True)
class Hoisted:
    """One cast that became an input: the graph input that it casts, and the dtype."""

    source: int
    dtype: torch.dtype


def hoist_weight_casts(gm: GraphModule, weights: Collection[int]) -> list[Hoisted]:
    """Replace the casts of the inputs numbered in ``weights`` with new inputs, appended in order.

    Law: if the copies equal the rounded weights, no output changes by a bit; a weight's gradient is the sum of its own
    and its copies'. A weight that the graph writes keeps its casts. Exactness: bit-exact.
    """
    memory = observe(gm, marks(gm))
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    numbers = {inputs[i]: i for i in weights if not memory.is_written(inputs[i])}
    found = []
    for node in list(gm.graph.nodes):
        source = node.args[0] if CAST in node.meta and node.op == "call_method" else None
        if isinstance(source, Node) and source in numbers and value(node).dtype.itemsize < 4:
            found.append(Hoisted(numbers[source], value(node).dtype))
            inputs.append(_as_input(gm, node, inputs[-1]))
    return found


def _as_input(gm: GraphModule, cast: Node, last: Node) -> Node:
    with gm.graph.inserting_after(last):
        made = gm.graph.placeholder(f"{cast.args[0]}_{cast.name}")
    made.meta = {k: v for k, v in cast.meta.items() if k not in (CAST, CHECKPOINT)}
    cast.replace_all_uses_with(made)
    gm.graph.erase_node(cast)
    return made
