"""The user's own regions in a captured graph: ``torch.autocast``, ``no_grad``, and transforms of ``torch.func``.

Before: ``_enter_autocast(...)``, nodes, ``_exit_autocast(...)``. After: the nodes inside are marked.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.meta_keys import GRAD, REGION, TRANSFORM

ENABLES = {"_set_grad_enabled": True, "_enter_inference_mode": False}  # with these arguments, gradients are recorded
_SWITCHES = frozenset({*ENABLES, "_enter_autocast", "_saved_tensors_hooks_disable"})


def _called(node: Node) -> str:
    """Return the name of the function that ``node`` calls, "" for other nodes."""
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def mark_regions(gm: GraphModule) -> None:
    """Mark the nodes of ``gm`` that are inside the user's own regions."""
    open_regions: list[Any] = []
    grad, depth = True, 0
    for node in gm.graph.nodes:
        name = _called(node)
        if name == "_enter_autocast":
            open_regions.append(node.args)
        elif name == "_exit_autocast" and open_regions:
            open_regions.pop()
        elif name == "_set_grad_enabled":
            grad = bool(node.args[0])
        depth += name.endswith("_increment_nesting")
        if depth:
            node.meta[TRANSFORM] = True
            node.meta[REGION] = "inside a torch.func transform: runs exactly as captured"
        depth -= name.endswith("_decrement_nesting")
        node.meta[GRAD] = grad
        if open_regions and not name.endswith("_autocast"):
            enabled = open_regions[-1][2] if len(open_regions[-1]) > 2 else True
            node.meta[REGION] = f"inside the user's torch.autocast(enabled={enabled}): runs exactly as captured"


def switches_modes(gm: GraphModule) -> bool:
    """Say whether ``gm``, or a graph inside it, has nodes that enter or leave a region."""
    names = (_called(n) for part in gm.modules() if isinstance(part, GraphModule) for n in part.graph.nodes)
    return any(name in _SWITCHES or name.endswith("_increment_nesting") for name in names)


def is_trained(node: Node) -> bool:
    """Say whether gradients flow through ``node``."""
    return bool(node.meta.get(GRAD, True)) and any(t.requires_grad for t in tensors(captured(node)))


def may_record_gradients(gm: GraphModule) -> bool:
    """Say whether a graph that was captured without gradients enables them for some of its nodes."""
    return any(bool(n.args[0]) is ENABLES[name] for n in gm.graph.nodes if (name := _called(n)) in ENABLES)
