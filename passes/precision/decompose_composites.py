"""Expand a node whose operations have different classes into those operations.

Before: ``y, _ = multi_head_attention_forward(q, k, v, ...)``. After: the linears, the softmax and the matmuls
inside it. Exactness: bit-exact (the same ATen operations run, in the same order).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from amp_graph.lists import OpList
from amp_graph.lists.errors import Attempt
from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.edit import give_value, inline, place_like, replace_by, set_identity
from amp_graph.passes.graph.fake_values import captured, fake_mode_of, tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.graph_text import target_text
from amp_graph.passes.graph.identify_ops import is_tensor_call, names_of, only_views, tensor_inputs
from amp_graph.passes.graph.meta_keys import GRAD, MARK, WISH
from amp_graph.passes.graph.trace_node import ADDING, trace_node
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.classify import classified
from amp_graph.passes.precision.conditioning import leads_to_softmax
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensorMode

ADDS = frozenset({"aten.baddbmm", "aten.addmm"})


@dataclass(frozen=True)
class DecomposeComposites(Pass):
    """Replaces a node whose operations a list puts in different classes by those operations.

    So is ``baddbmm`` or ``addmm`` that adds a mask to what a softmax reads: the product may be low, the sum not.
    Exactness: approximate (that sum is rounded after its product); else bit-exact.
    """

    options: PipelineOptions

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Expand what can be expanded; report the others, which run as captured."""
        mode = fake_mode_of(gm)
        for node in list(gm.graph.nodes):
            if mode is None or not is_tensor_call(node):
                continue
            found = classified(node, self.options.lists, mode)
            if not found.expand:
                continue
            parts = expand(gm, node, found.decomposed, mode)
            if parts is None:
                yield Skip(node.name, "its operations have different classes; not expandable: runs as captured")
            else:
                yield Change(self.name, "expanded", node.name, f"into {len(parts)} operations of different classes")
        if mode is not None and self.options.lists.unlisted == "opaque":
            for node in _masked_products(gm, self.options.lists, mode):
                if expand(gm, node, frozenset(ADDING), mode) is not None:
                    yield Change(self.name, "expanded", node.name, "its sum is for a softmax")


def _masked_products(gm: GraphModule, lists: OpList, mode: FakeTensorMode) -> list[Node]:
    """Return the products that add a value of two dimensions or more, no bias, to what a softmax reads."""
    found = [n for n in gm.graph.nodes if is_tensor_call(n) and not ADDS.isdisjoint(names_of(n))]
    found = [n for n in found if "out" not in n.kwargs and captured(tensor_inputs(n)[0]).dim() > 1]
    if not found:
        return []
    leads = leads_to_softmax(
        gm.graph.nodes, {n: classified(n, lists, mode) for n in gm.graph.nodes if is_tensor_call(n)}
    )
    return [n for n in found if n in leads]


def expand(gm: GraphModule, node: Node, decompose: frozenset[OpOverload], mode: FakeTensorMode) -> list[Node] | None:
    """Replace ``node`` by its operations and return them; return None and change nothing if that is not possible.

    It is not possible if the result is a structure that is read as a whole, or if tracing fails on symbolic sizes. If
    ``node`` is planned, its operations are planned as it was.
    """
    with Attempt() as tried:
        small = trace_node(node, mode, decompose)
    if tried.error is not None:  # torch cannot trace some symbolic sizes; the caller reports the node as skipped
        return None
    taken_apart = all(u.op == "call_function" and u.target is operator.getitem for u in node.users)
    result = small.graph.output_node().args[0]
    if not isinstance(result, Node) and not taken_apart:
        return None
    held = lambda part: _constant(gm, getattr(small, str(part.target)), part)  # noqa: E731
    replacement, made = inline(gm, small.graph, tensor_inputs(node, torch.SymInt), node, held)
    for part in made:
        place_like(part, node, part.meta.get("val"), ("source_fn_stack", WISH))
        if part.meta.get(GRAD, True) and any(map(is_trained, part.all_input_nodes)):
            for tensor in filter(torch.is_floating_point, tensors(value(part))):  # the trace was of detached inputs
                tensor.requires_grad_()
    replace_by(node, replacement)
    mark = node.meta.get(MARK)
    for part in filter(is_tensor_call, made):
        set_identity(part, mode)
        if mark is not None and tensors(value(part)) and not only_views(part):  # planned as the whole was
            why = mark.reason.removeprefix(f"{', '.join(mark.ops)}: ")
            part.meta[MARK] = replace(mark, ops=names_of(part), reason=f"in {target_text(node)}: {why}")
    return made


def _constant(gm: GraphModule, tensor: torch.Tensor, part: Node) -> Node:
    """Register a constant tensor that tracing made, such as the scalar of a ``setitem``."""
    index = 0
    while hasattr(gm, f"_amp_constant{index}"):
        index += 1
    gm.register_buffer(f"_amp_constant{index}", tensor, persistent=False)
    made = gm.graph.get_attr(f"_amp_constant{index}")
    give_value(made, part.meta.get("val", tensor))
    return made
