"""Remove empty tensors from concatenations.

Before: ``cat([empty, keys], dim=-2)``, at the start of a key-value cache: the empty tensor is fp32, and promotes
low-precision keys to fp32. After: ``cat([keys], dim=-2)``, in the precision of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.edit import set_identity
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import Identity
from amp_graph.passes.graph.meta_keys import IDENTITY
from amp_graph.passes.graph.node_info import calls_torch

CATS = (("aten.cat",), ("aten.concat",), ("aten.concatenate",))


@dataclass(frozen=True)
class RemoveEmptyConcatOperands(Pass):
    """Replaces ``cat([a, b, c])`` by ``cat([b, c])`` where ``a`` has no elements.

    Law: ``a`` has the shape (0,), which torch skips for any other shapes; it needs no gradient; and the others give
    the same dtype without it. Exactness: bit-exact; the result is still a copy.
    """

    name: ClassVar[str] = "remove-empty-concat-operands"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every ``cat``."""
        mode, changes = fake_mode_of(gm), []
        for node in gm.graph.nodes:
            parts = _concatenated(node)
            kept = [p for p in parts if not _is_nothing(p)]
            if mode is None or not kept or len(kept) == len(parts) or _dtype(kept) != value(node).dtype:
                continue
            _set_parts(node, kept)
            set_identity(node, mode)
            changes.append(Change(self.name, "deleted", node.name, f"{len(parts) - len(kept)} empty tensors"))
        return PassResult(gm, tuple(changes))


def _concatenated(node: Node) -> list[Node]:
    """Return the operands of a concat; [] for other nodes, and for one that writes to ``out``."""
    found = node.meta.get(IDENTITY)
    if not isinstance(found, Identity) or found.names not in CATS or "out" in node.kwargs or not calls_torch(node):
        return []
    parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
    whole = isinstance(parts, (list, tuple)) and all(
        isinstance(p, Node) and isinstance(value(p), torch.Tensor) for p in parts
    )
    return list(parts) if whole else []


def _is_nothing(part: Node) -> bool:
    shape = value(part).shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0 and not is_trained(part)


def _dtype(parts: list[Node]) -> torch.dtype:
    made = value(parts[0]).dtype
    for part in parts[1:]:
        made = torch.promote_types(made, value(part).dtype)
    return made


def _set_parts(node: Node, parts: list[Node]) -> None:
    if node.args:
        node.args = (parts, *node.args[1:])
    else:
        node.kwargs = {**node.kwargs, "tensors": parts}
