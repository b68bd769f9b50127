"""Pieces of a broken model: graphs that were captured under ``torch.autocast``, because the code around them runs so.

Before: ``linear(x: bf16, weight: f32) -> bf16``, which only autocast could run. After: as captured in fp32, with ``x``
known to arrive, and the result known to leave, in bf16; a graph that can be planned like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.passes.autocast_regions.user_casts import METHODS
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.activation_checkpoints import inline_checkpoints
from amp_graph.passes.graph.autograd_functions import is_custom_function
from amp_graph.passes.graph.edit import give_value
from amp_graph.passes.graph.fake_values import adopt_values, fake_mode_of, keep_trained, tensors, value
from amp_graph.passes.graph.identify_ops import identify, is_tensor_call
from amp_graph.passes.graph.meta_keys import GIVEN, LEAVES, PIECE, TAKES
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensor, FakeTensorMode, tracing_fake
from amp_graph.passes.torch_compat.storage import storage_key, storage_of

WHY = "arrives in low precision, or is made so by the user's code"
BITS = "it shows the bits of a low-precision value as another dtype"
AS_COMPLEX = (torch.view_as_complex, torch.ops.aten.view_as_complex.default)
OWN_BITS = "it shows the bits of a value that the user converted to low precision"


def adopt_piece(gm: GraphModule, dtype: torch.dtype) -> str:
    """Make ``gm``, captured under autocast to ``dtype``, as if captured in fp32; return why not where it cannot be.

    Each low-precision value is recorded as the fp32 one that it stands for. What is low by itself (an input, a
    conversion) is marked as ``GIVEN``, and what the graph returns with the dtype that the code behind it expects.
    """
    adopt_values(gm)
    inline_checkpoints(gm)
    refused = refusal(gm, dtype)
    if refused:
        return refused
    adopt_values(gm)
    gm.meta[PIECE] = True
    widening = _Widening(dtype, [t for node in gm.graph.nodes for t in tensors(value(node))])
    for node in filter(is_custom_function, gm.graph.nodes):
        node.meta[TAKES] = {s for s in node.all_input_nodes if any(t.dtype == dtype for t in tensors(value(s)))}
    output = gm.graph.output_node()
    output.meta[LEAVES] = tuple(dtype if _is_low(leaf, dtype) else None for leaf in tree_leaves(output.args))
    for node in gm.graph.nodes:
        if any(t.dtype == dtype for t in tensors(value(node))):
            _adopt(node, dtype, widening)
    return ""


def leaving(gm: GraphModule) -> dict[Node, torch.dtype]:
    """Return the values that leave ``gm`` in low precision, and in which: what the code behind a piece expects.

    Passes put other nodes in the place of those that were captured: what is known is the place in the output.
    """
    output = gm.graph.output_node()
    dtypes = output.meta.get(LEAVES, ())
    return {n: d for n, d in zip(tree_leaves(output.args), dtypes, strict=False) if isinstance(n, Node) and d}


def _is_low(leaf: Any, dtype: torch.dtype) -> bool:
    val = value(leaf) if isinstance(leaf, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype == dtype


def refusal(gm: GraphModule, dtype: torch.dtype) -> str:
    """Return why ``gm`` has to run under autocast as it stands, or ""."""
    for node in gm.graph.nodes:
        if node_info.is_higher_order(node) and not runs_without_autocast(gm, node):
            return f"{node.name} was traced inside, under autocast"
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_enter_autocast" and (len(node.args) < 3 or node.args[2]):
            return "the user's torch.autocast(enabled=True) is inside of it"
        if name.endswith("_increment_nesting"):
            return "a torch.func transform is inside of it"
        shown = [t for t in bits_shown(node) if t.dtype == dtype]
        if shown:
            return OWN_BITS if {storage_key(t) for t in shown} <= _converted(gm, dtype) else BITS
        low = any(t.dtype == dtype for t in tensors(value(node)))
        if low and node.target == "type" and any(isinstance(a, str) for a in node.args):
            return "it names a dtype in words"
    return ""


def _converted(gm: GraphModule, dtype: torch.dtype) -> set[Any]:
    """Return the storages of what the user's own conversions make in ``dtype``."""
    made = (n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr") and _is_low_by_itself(n, dtype))
    return {storage_key(t) for n in made for t in tensors(value(n)) if t.dtype == dtype}


def bits_shown(node: Node) -> list[torch.Tensor]:
    """Return the operands whose memory ``node`` shows as another dtype (``view(torch.int32)``, ``view_as_complex``).

    In another precision they have other bits, and another number of them.
    """
    made = {(storage_key(t), t.dtype) for t in tensors(value(node))}
    if not made or node.op not in ("call_function", "call_method"):
        return []
    given = [t for source in node.all_input_nodes for t in tensors(value(source))]
    if node.target in AS_COMPLEX:  # whose fake result of bfloat16, which has no complex numbers, is no view
        return given
    return [t for t in given if any(key == storage_key(t) and dtype != t.dtype for key, dtype in made)]


def runs_without_autocast(gm: GraphModule, node: Node) -> bool:
    """Say whether ``node`` is a custom ``autograd.Function`` that does the same under autocast as without.

    Nothing in its two bodies has a rule there: what they compute in is what they are given.
    """
    if not is_custom_function(node):
        return False
    bodies = [getattr(gm, str(s.target), None) for s in node.all_input_nodes if s.op == "get_attr"]
    return all(_has_no_rule(body) for body in bodies if isinstance(body, GraphModule))


def _has_no_rule(body: GraphModule) -> bool:
    adopt_values(body)
    mode = fake_mode_of(body)
    for node in body.graph.nodes:
        if node_info.is_higher_order(node):
            return False
        if mode is None or not is_tensor_call(node):
            continue
        kinds = {t.device.type for t in tensors(value(node))}
        if any(_meets_a_rule(node, mode, kind) for kind in kinds):
            return False
    return True


def _meets_a_rule(node: Node, mode: FakeTensorMode, device: str) -> bool:
    """Say whether autocast casts what ``node`` is given, or what some part of it is, or whether nobody knows.

    It has no rule for ``einsum`` on the CPU, and one for the ``bmm`` that it is made of.
    """
    apart: frozenset[OpOverload] = frozenset()
    while True:
        found = identify(node, mode, apart)
        if isinstance(found, str) or any(node_info.autocast_has_rule(o.op, device) for o in found.operations):
            return True
        more = {o.op for o in found.operations if node_info.is_composite(o.op) and not node_info.is_view(o.op)} - apart
        if not more:
            return False
        apart |= more


def _adopt(node: Node, dtype: torch.dtype, widening: _Widening) -> None:
    low, wide = value(node), widening.of(value(node))
    if _is_low_by_itself(node, dtype):
        node.meta[GIVEN] = low
    give_value(node, wide)


def _is_low_by_itself(node: Node, dtype: torch.dtype) -> bool:
    if node.op in ("placeholder", "get_attr") or TAKES in node.meta:
        return True
    asked = any(leaf is dtype for leaf in tree_leaves((node.args, dict(node.kwargs))))
    return asked or (node.op == "call_method" and METHODS.get(str(node.target)) is dtype)


class _Widening:
    """The fp32 values that stand for those of low precision; what shared memory shares it again."""

    def __init__(self, dtype: torch.dtype, known: list[torch.Tensor]) -> None:
        self.dtype = dtype
        self.known = known  # their ids are keys below
        self.made: dict[int, torch.Tensor] = {}
        self.bases: dict[int, torch.Tensor] = {}

    def of(self, val: Any) -> Any:
        return tree_map_only(torch.Tensor, self._one, val)

    def _one(self, low: torch.Tensor) -> torch.Tensor:
        if low.dtype != self.dtype or not isinstance(low, FakeTensor):
            return low
        if id(low) not in self.made:
            with tracing_fake(low.fake_mode, symbolic=False), torch.no_grad():
                self.made[id(low)] = self._widened(low)
            keep_trained(self.made[id(low)], low)
        return self.made[id(low)]

    def _widened(self, low: torch.Tensor) -> torch.Tensor:
        key = storage_key(low)
        if key is None:
            return torch.empty_like(low, dtype=torch.float32)
        if key not in self.bases:
            count = storage_of(low).nbytes() // low.element_size()
            self.bases[key] = torch.empty(count, dtype=torch.float32, device=low.device)
        return self.bases[key].as_strided(low.shape, low.stride(), low.storage_offset())
