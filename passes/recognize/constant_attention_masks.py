"""Leave out attention's mask where it hides nothing, or exactly what lies ahead.

Before: ``mask = arange(n) >= arange(n)[:, None]; scaled_dot_product_attention(q, k, v, attn_mask=mask)``. After:
``scaled_dot_product_attention(q, k, v, is_causal=True)``. Models of transformers make no mask where they need none;
but they look at values for that, and where they are captured they cannot.
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

MOST = 1 << 26  # elements of a mask that is made to look at it
HIDDEN = -1e4  # a score's summand that leaves no probability beside any that nothing was added to


@dataclass(frozen=True)
class FoldConstantMasks(Pass):
    """Drops masks that hide nothing; puts ``is_causal=True`` for those that hide what lies ahead, and that alone.

    Law: the mask is made of numbers in the graph, of no input and no random number; of as many queries as keys where it
    is causal. Exactness: rounding-equal, by a kernel that reads no mask, which flash attention on CUDA demands.
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
                ahead = looked_at[mask] == "what lies ahead"
                node.args = tuple(given[name] for name in NAMES[:3])
                node.kwargs = keywords_of({**given, "attn_mask": None, "is_causal": ahead})
                changes.append(Change(self.name, "mask left out", node.name, f"it hides {looked_at[mask]}"))
        for mask in looked_at:
            _erase_unread(gm, mask)
        return PassResult(gm, tuple(changes))


def _erase_unread(gm: GraphModule, mask: Node) -> None:
    """Erase what nobody reads any more of what a mask was computed from."""
    for node in reversed(_sources(mask) or ()):
        if not node.users:
            gm.graph.erase_node(node)


def _what_it_hides(mask: Node) -> str:
    """Return "nothing", "what lies ahead", or "" for anything else, and what cannot be known."""
    made = _made(mask)
    if made is None or made.dim() < 2:
        return ""
    made = made[tuple(slice(0, 1) if step == 0 else slice(None) for step in made.stride()[:-2])]  # of copies, the first
    seen = made if made.dtype == torch.bool else made == 0
    if not made.dtype == torch.bool and not bool(((made == 0) | (made <= HIDDEN)).all()):
        return ""
    if bool(seen.all()):
        return "nothing"
    square = made.shape[-1] == made.shape[-2]
    return "what lies ahead" if square and bool((seen == torch.ones_like(seen).tril()).all()) else ""


def _made(mask: Node) -> Tensor | None:
    """Compute a mask from the numbers in the graph; None where there is more to it."""
    sources = _sources(mask)
    if sources is None or not isinstance(value(mask), Tensor):
        return None
    try:
        made = _computed(sources)
    except (RuntimeError, NotImplementedError):  # what the CPU has no kernel for stays as it is
        return None
    return made if same(made.shape, value(mask).shape) else None


def _computed(nodes: Sequence[Node]) -> Tensor:
    """Run ``nodes``, which read nothing but each other, on the CPU; return what the last of them makes."""
    found: dict[Node, Any] = {}
    with outside_modes(), torch.no_grad(), torch.device("cpu"):
        for node in nodes:
            args, kwargs = tree_map(_on_cpu, map_arg((node.args, dict(node.kwargs)), found.__getitem__))
            call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
            found[node] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    made: Tensor = found[nodes[-1]]
    return made


def _on_cpu(argument: Any) -> Any:
    """Return an argument of a call for the same call on the CPU."""
    device = isinstance(argument, torch.device) or (isinstance(argument, str) and argument.startswith("cuda"))
    return torch.device("cpu") if device else argument


def _sources(mask: Node) -> Sequence[Node] | None:
    """Return what a mask is computed from, in order, itself last; None where that is not numbers alone."""
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
    """Say whether a node makes the same of the same, writes nothing, and is small."""
    found = node.meta.get(IDENTITY)
    if node.op not in ("call_function", "call_method") or not isinstance(found, Identity) or node.target == "cuda":
        return False
    if any(node_info.is_mutable(o.op) or node_info.is_random(o.op) for o in found.operations):
        return False
    sizes = [t.shape for t in tensors(value(node))]
    return all(type(n) is int for shape in sizes for n in shape) and all(shape.numel() <= MOST for shape in sizes)
