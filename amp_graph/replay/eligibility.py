"""What must not be recorded, each with its reason.

A recording repeats kernels with the addresses, sizes and numbers of one call. What asks the device for a value, what
copies between host and device, and what Python decides anew at each call would be repeated as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.node_info import calls_torch, is_higher_order, schema_arguments
from amp_graph.passes.torch_compat.dispatch import PLAIN, OpOverload
from amp_graph.replay.flat_graph import Flat, is_draw

KNOWN = frozenset(("aten", "prims", "amp_graph", "mkldnn", "torchvision"))  # operators that only launch kernels
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "c10d_functional", "_dtensor"))
# Their CUDA kernels read a value on the host; torch has no tag for that.
WAITS = frozenset(
    "_linalg_check_errors linalg_eig _linalg_eigh _linalg_svd linalg_lstsq _ctc_loss _use_cudnn_ctc_loss "
    "repeat_interleave histc bincount".split()
)
CHANGES_MEMORY = frozenset("set_ resize_ resize_as_ record_stream".split())
Rule = Callable[[Node, torch.device], str]


def why_not_captured(gm: GraphModule, args: Sequence[Any]) -> str:
    """Return why a captured graph cannot be recorded, read off the graph before it is traced; "" if nothing says so."""
    for a in args:
        if isinstance(a, Tensor) and (type(a) not in PLAIN or a.layout is not torch.strided):
            return f"an input is a {type(a).__name__}, not an ordinary tensor"
    for part in (part for part in gm.modules() if isinstance(part, GraphModule)):
        for node in part.graph.nodes:
            if node.op == "call_function" and not calls_torch(node) and not is_higher_order(node):
                name = getattr(node.target, "__qualname__", str(node.target))
                return f"it calls {name}, Python code that would not run again"
            if node.op == "call_method" and str(node.target).startswith("register_"):
                return f"it calls {node.target}: the hook would not run again"
            if node.op == "get_attr" and _is_trained(part, str(node.target)):
                return f"it holds {node.target}, which has a gradient, as a constant"
    return ""


def _is_trained(gm: GraphModule, path: str) -> bool:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, Tensor) and found.requires_grad


def why_not_flat(flat: Flat, args: Sequence[Any], by_copy: Sequence[int]) -> str:
    """Return why flat graphs must not be recorded; "" if they may be. ``by_copy``: arguments that are copied."""
    given = {args[i].device for i in flat.tensors}
    if len(given) != 1:
        return f"its inputs are on {' and '.join(sorted(map(str, given))) or 'no device'}"
    if flat.written & set(by_copy):
        return "it writes to an input that belongs to the caller"
    (device,) = given
    for gm, is_backward in ((flat.forward, False), (flat.backward, True)):
        for node in gm.graph.nodes if gm is not None else ():
            if why := next(filter(None, (rule(node, device) for rule in RULES)), ""):
                return why
            if is_backward and is_draw(node):
                return "backward draws random numbers, as a checkpoint does that runs forward again"
    return ""


def _foreign(node: Node, _: torch.device) -> str:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return f"it calls {node.target}, which holds code of its own" if is_higher_order(node) else ""
    if node.target.namespace in COLLECTIVES:
        return f"it communicates between ranks: {node.target}"
    if node.target.namespace not in KNOWN:
        return f"it calls {node.target}, a custom operator, which may do more than launch kernels"
    return ""


def _asks_for_data(node: Node, _: torch.device) -> str:
    if not isinstance(node.target, OpOverload):
        return ""
    tags, name = node.target.tags, node.target._schema.name.partition("::")[2]
    if torch.Tag.data_dependent_output in tags or name in WAITS:
        return f"{name} waits for a value of the device"
    if torch.Tag.dynamic_output_shape in tags:
        return f"the shape of {name}'s result depends on data"
    if name in CHANGES_MEMORY:
        return f"{name} changes memory that a recording would go on using"
    return ""


def _selects_by_mask(node: Node, _: torch.device) -> str:
    """``x[mask] = y`` counts the mask's elements on the host."""
    if not isinstance(node.target, OpOverload) or "index_put" not in node.target._schema.name:
        return ""
    indices: Any = schema_arguments(node.target, node.args, dict(node.kwargs)).get("indices")
    masks = [t for n in indices if isinstance(n, Node) for t in tensors(value(n))]
    return "a mask selects what is written" if any(t.dtype in (torch.bool, torch.uint8) for t in masks) else ""


def _elsewhere(node: Node, device: torch.device) -> str:
    if node.op == "output":
        return ""
    found = {t.device for t in tensors(value(node))} - {device}
    return f"{node.name} is on {next(iter(found))}, not on {device}" if found else ""


def _constant_elsewhere(node: Node, device: torch.device) -> str:
    """Constants have no recorded value."""
    if node.op != "get_attr":
        return ""
    found: Any = getattr(node.graph.owning_module, str(node.target), None)
    wrong = isinstance(found, Tensor) and found.device != device
    return f"a constant is on {found.device}, not on {device}" if wrong else ""


RULES: Sequence[Rule] = (_foreign, _asks_for_data, _selects_by_mask, _elsewhere, _constant_elsewhere)


def why_no_second_order(flat: Flat) -> Iterator[str]:
    """Yield why a call cannot be run again for ``create_graph=True``: it would not be the same call."""
    inputs = dict(zip(flat.tensors, flat.forward.graph.find_nodes(op="placeholder"), strict=True))
    for i in flat.written:
        for user in inputs[i].users:
            name = getattr(getattr(user.target, "_schema", None), "name", str(user.target))
            if "batch_norm" not in name and not name.endswith("add_"):
                yield f"it reads a buffer that it writes ({name})"
