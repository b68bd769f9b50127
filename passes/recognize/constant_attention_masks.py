"""Remove a constant attention mask that hides nothing, or that is exactly the causal mask.

Before: ``mask = arange(n) >= arange(n)[:, None]; scaled_dot_product_attention(q, k, v, attn_mask=mask)``. After:
``scaled_dot_product_attention(q, k, v, is_causal=True)``. Models of transformers skip a mask that they do not need;
but they read values to find out, which is not possible during capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.identify_ops import Identity
from amp_graph.passes.graph.meta_keys import IDENTITY
from amp_graph.passes.op_args.attention_args import NAMES, SDPA, keywords_of
from amp_graph.passes.torch_compat.fake import outside_modes
from amp_graph.passes.torch_compat.symbolic_sizes import same

MOST = 1 << 26  # most elements of a mask that is computed here
HIDDEN = -1e4  # an addend up to this one gives a position probability 0 beside an unmasked one


@dataclass(frozen=True)
class FoldConstantMasks(Pass):
    """Drops masks that hide nothing, and replaces causal masks by ``is_causal=True``.

    Law: the mask is computed from constants in the graph, not from inputs or random numbers; a causal mask has as many
    queries as keys. Exactness: rounding-equal. Flash attention on CUDA requires a call without a mask.
    """

    name: ClassVar[str] = "fold-constant-masks"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every attention with a mask."""
        changes = []
        looked_at: dict[Node, str] = {}
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
                continue
            given = node_info.schema_arguments(SDPA, node.args, dict(node.kwargs))
            mask = given["attn_mask"]
            if not isinstance(mask, Node) or given["is_causal"]:
                continue
            if mask not in looked_at:
                looked_at[mask] = _what_it_hides(mask)
            if looked_at[mask]:
                ahead = looked_at[mask] == "later positions"
                node.args = tuple(given[name] for name in NAMES[:3])
                node.kwargs = keywords_of({**given, "attn_mask": None, "is_causal": ahead})
                changes.append(Change(self.name, "removed the mask", node.name, f"it hides {looked_at[mask]}"))
        for mask in looked_at:
            _erase_unread(gm, mask)
        return PassResult(gm, tuple(changes))


def _erase_unread(gm: GraphModule, mask: Node) -> None:
    """Erase the nodes of a mask's computation that have no reader left."""
    for node in reversed(_sources(mask) or ()):
        if not node.users:
            gm.graph.erase_node(node)


def _what_it_hides(mask: Node) -> str:
    """Return "nothing", "later positions" (causal), or "" for any other or unknown mask."""
    made = _constant_value(mask)
    if made is None or made.dim() < 2:
        return ""
    made = made[tuple(slice(0, 1) if step == 0 else slice(None) for step in made.stride()[:-2])]  # expanded dims: one
    seen = made if made.dtype == torch.bool else made == 0
    if not made.dtype == torch.bool and not bool(((made == 0) | (made <= HIDDEN)).all()):
        return ""
    if bool(seen.all()):
        return "nothing"
    square = made.shape[-1] == made.shape[-2]
    return "later positions" if square and bool((seen == torch.ones_like(seen).tril()).all()) else ""


def _constant_value(mask: Node) -> Tensor | None:
    """Compute a mask from the constants in the graph; None if it depends on anything else."""
    sources = _sources(mask)
    if sources is None or not isinstance(value(mask), Tensor):
        return None
    try:
        made = _computed(sources)
    except (RuntimeError, NotImplementedError):  # the CPU has no kernel for an operation: keep the mask
        return None
    return made if same(made.shape, value(mask).shape) else None


def _computed(nodes: Sequence[Node]) -> Tensor:
    """Run ``nodes``, which read only each other, on the CPU; return the result of the last."""
    found: dict[Node, Any] = {}
    with outside_modes(), torch.no_grad(), torch.device("cpu"):
        for node in nodes:
            args, kwargs = tree_map(_on_cpu, map_arg((node.args, dict(node.kwargs)), found.__getitem__))
            call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
            found[node] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    made: Tensor = found[nodes[-1]]
    return made


def _on_cpu(argument: Any) -> Any:
    """Return a call's argument with a CUDA device replaced by the CPU."""
    device = isinstance(argument, torch.device) or (isinstance(argument, str) and argument.startswith("cuda"))
    return torch.device("cpu") if device else argument


def _sources(mask: Node) -> Sequence[Node] | None:
    """Return the nodes that compute a mask, in order, the mask last; None if they read more than constants."""
    inside: set[Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in inside:
            continue
        if not _is_arithmetic(node):
            return None
        inside.add(node)
        todo += node.all_input_nodes
    return [n for n in mask.graph.nodes if n in inside]


def _is_arithmetic(node: Node) -> bool:
    """Say whether a node is deterministic, has no side effects, and is small."""
    found = node.meta.get(IDENTITY)
    if node.op not in ("call_function", "call_method") or not isinstance(found, Identity) or node.target == "cuda":
        return False
    if any(node_info.is_mutable(o.op) or node_info.is_random(o.op) for o in found.operations):
        return False
    sizes = [t.shape for t in tensors(value(node))]
    return all(type(n) is int for shape in sizes for n in shape) and all(shape.numel() <= MOST for shape in sizes)
