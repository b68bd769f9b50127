"""Store weights that are only read in low precision in low precision.

Before: ``linear(x, weight.half())``, with an fp32 ``weight``. After: ``linear(x, weight)``, with an fp16 ``weight``.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.casts.portable_ops import CAST_OP
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.node_info import is_view
from amp_graph.passes.torch_compat.dispatch import OpOverload

Holder = tuple[torch.nn.Module, str]


def fold_weights(gm: GraphModule) -> tuple[str, ...]:
    """Replace each parameter and buffer that all its readers cast to one lower dtype by its copy in that dtype.

    A weight under several names is folded if this holds for all of them. Names stay. Returns the names folded, sorted.
    """
    groups: dict[int, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(_tensor(gm, node), torch.Tensor):
            groups.setdefault(id(_tensor(gm, node)), []).append(node)
    folded: list[str] = []
    for nodes in groups.values():
        dtype = _only_dtype(nodes)
        if dtype is not None:
            _fold(gm, nodes, dtype)
            folded += [str(node.target) for node in nodes]
    return tuple(sorted({*folded}))


def _tensor(gm: GraphModule, node: Node) -> torch.Tensor | None:
    holder, name = _place(gm, str(node.target))
    found = getattr(holder, name, None)
    return found if isinstance(found, torch.Tensor) else None


def _place(gm: GraphModule, path: str) -> Holder:
    prefix, _, name = path.rpartition(".")
    return gm.get_submodule(prefix), name


def _only_dtype(nodes: list[Node]) -> torch.dtype | None:
    """Return the dtype that all readers cast the weight of ``nodes`` to, or a view of it, if it is one lower dtype."""
    readers = [reader for node in nodes for reader in _readers(node)]
    if not readers or any(reader.target is not CAST_OP for reader in readers):
        return None
    dtypes = {value(reader).dtype for reader in readers}
    dtype = next(iter(dtypes))
    lower = dtype.is_floating_point and dtype.itemsize < value(nodes[0]).dtype.itemsize
    return dtype if len(dtypes) == 1 and lower else None


def _is_view(node: Node) -> bool:
    """Say whether ``node`` is another view of its only tensor, in the same dtype."""
    if not isinstance(node.target, OpOverload) or not is_view(node.target) or len(node.all_input_nodes) != 1:
        return False
    given, made = value(node.all_input_nodes[0]), value(node)
    return isinstance(made, torch.Tensor) and made.dtype == given.dtype


def _readers(node: Node) -> list[Node]:
    """Return the readers of ``node`` and of views of it; a view that nothing reads is a reader itself."""
    found: list[Node] = []
    for user in node.users:
        found += _readers(user) if _is_view(user) and user.users else [user]
    return found


def _fold(gm: GraphModule, nodes: list[Node], dtype: torch.dtype) -> None:
    old = _tensor(gm, nodes[0])
    assert old is not None, "grouped by its tensor"
    new = old.detach().to(dtype)
    made = torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
    for node in nodes:
        holder, name = _place(gm, str(node.target))
        setattr(holder, name, made)
        _read_low(gm, node, dtype)


def _read_low(gm: GraphModule, node: Node, dtype: torch.dtype) -> None:
    """Remove the casts behind ``node``, a weight or a view of one, and record that it is in ``dtype``."""
    node.meta["val"] = value(node).to(dtype)
    for user in list(node.users):
        if user.target is CAST_OP:
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        else:
            _read_low(gm, user, dtype)
