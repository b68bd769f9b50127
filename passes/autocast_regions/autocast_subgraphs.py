"""Partial graphs of a model with graph breaks, captured under ``torch.autocast`` because the code between runs so.

Before: ``linear(x: bf16, weight: f32) -> bf16``, which only runs under autocast. After: the graph looks as if captured
in fp32, with ``x`` marked as a bf16 input and the result as a bf16 output. It can be planned like any other graph.
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
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.decompositions import DECOMPOSITIONS
from amp_graph.passes.graph.edit import give_value
from amp_graph.passes.graph.fake_values import adopt_values, fake_mode_of, keep_trained, tensors, value
from amp_graph.passes.graph.identify_ops import identify, is_tensor_call
from amp_graph.passes.graph.meta_keys import GIVEN, LEAVES, PIECE, TAKES
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensor, FakeTensorMode, tracing_fake
from amp_graph.passes.torch_compat.storage import storage_key, storage_of

WHY = "is a low-precision input, or a low-precision result of the user's code"
BITS = "it reinterprets the bits of a low-precision value as another dtype"
AS_COMPLEX = (torch.view_as_complex, torch.ops.aten.view_as_complex.default)
OWN_BITS = "it reinterprets the bits of a value that the user converted to low precision"


def adopt_piece(gm: GraphModule, dtype: torch.dtype) -> str:
    """Convert ``gm``, captured under autocast to ``dtype``, to a graph captured in fp32; return why not, or "".

    Each low-precision value is recorded as the fp32 value that it replaces. Values that are low without autocast (an
    input, a conversion) are marked as ``GIVEN``. Outputs are marked with the dtype that the code after them expects.
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
    """Return the outputs of ``gm`` that must be low precision, with their dtypes, as the code after it expects.

    Passes replace captured nodes, so outputs are identified by their position.
    """
    output = gm.graph.output_node()
    dtypes = output.meta.get(LEAVES, ())
    return {n: d for n, d in zip(tree_leaves(output.args), dtypes, strict=False) if isinstance(n, Node) and d}


def _is_low(leaf: Any, dtype: torch.dtype) -> bool:
    val = value(leaf) if isinstance(leaf, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype == dtype


def refusal(gm: GraphModule, dtype: torch.dtype) -> str:
    """Return why ``gm`` has to run under autocast unchanged, or ""."""
    for node in gm.graph.nodes:
        if node_info.is_higher_order(node) and not runs_without_autocast(gm, node):
            return f"the body of {node.name} was traced under autocast"
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_enter_autocast" and (len(node.args) < 3 or node.args[2]):
            return "it contains a torch.autocast(enabled=True) of the user"
        if name.endswith("_increment_nesting"):
            return "it contains a torch.func transform"
        shown = [t for t in bits_shown(node) if t.dtype == dtype]
        if shown:
            return OWN_BITS if {storage_key(t) for t in shown} <= _converted(gm, dtype) else BITS
        low = any(t.dtype == dtype for t in tensors(value(node)))
        if low and node.target == "type" and any(isinstance(a, str) for a in node.args):
            return "it names a dtype by a string"
    return ""


def _converted(gm: GraphModule, dtype: torch.dtype) -> set[Any]:
    """Return the storages of the results of the user's own conversions to ``dtype``."""
    made = (n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr") and _is_low_by_itself(n, dtype))
    return {storage_key(t) for n in made for t in tensors(value(n)) if t.dtype == dtype}


def bits_shown(node: Node) -> list[torch.Tensor]:
    """Return the operands whose bits ``node`` reads as another dtype (``view(torch.int32)``, ``view_as_complex``).

    In another precision, the values and the number of these bits would differ.
    """
    made = {(storage_key(t), t.dtype) for t in tensors(value(node))}
    if not made or node.op not in ("call_function", "call_method"):
        return []
    given = [t for source in node.all_input_nodes for t in tensors(value(source))]
    if node.target in AS_COMPLEX:  # bfloat16 has no complex dtype, and the fake result is not a view
        return given
    return [t for t in given if any(key == storage_key(t) and dtype != t.dtype for key, dtype in made)]


def runs_without_autocast(gm: GraphModule, node: Node) -> bool:
    """Say whether ``node`` is a custom ``autograd.Function``, or a hook of a gradient, that autocast does not change.

    Autocast has no rule for any operation in its forward and backward: they compute in the dtypes of their inputs.
    """
    if not is_custom_function(node) and getattr(node.target, "__name__", "") != "register_hook":
        return False
    return all(map(_has_no_rule, filter(None, (graph_read(gm, source) for source in node.all_input_nodes))))


def _has_no_rule(body: GraphModule) -> bool:
    adopt_values(body)
    mode = fake_mode_of(body)
    for node in body.graph.nodes:
        if node_info.is_higher_order(node):
            return False
        if mode is None or not is_tensor_call(node):
            continue
        kinds = {t.device.type for t in tensors(value(node))}
        if any(meets_a_rule(node, mode, kind) for kind in kinds):
            return False
    return True


def meets_a_rule(node: Node, mode: FakeTensorMode, device: str) -> bool:
    """Say whether autocast has a rule for ``node`` or for an operation in its decomposition; True if unknown.

    It has no rule for ``einsum`` on the CPU, but has one for the ``bmm`` inside.
    """
    apart: frozenset[OpOverload] = frozenset()
    while True:
        found = identify(node, mode, apart)
        if isinstance(found, str) or any(node_info.autocast_has_rule(o.op, device) for o in found.operations):
            return True
        operators = {o.op for o in found.operations if not node_info.is_view(o.op)}
        more = {op for op in operators if node_info.is_composite(op) or op in DECOMPOSITIONS} - apart
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
    """The fp32 values that replace low-precision ones; values that share storage share it again."""

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
