"""Exports a model in mixed precision as an ``ExportedProgram`` of plain ATen operators.

Before: ``export(model, (x,), policy="fp16")``. After: a program that ``torch.export.save`` writes and that
``torch.export.load`` reads in a process without amp_graph. ``fold_weights=True``: ``linear(x, weight.half())`` with an
fp32 ``weight`` becomes ``linear(x, weight)`` with an fp16 one.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from amp_graph.convert import refuse_converted, refuse_what_is_no_model
from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.lists.errors import Attempt
from amp_graph.passes.casts.portable_ops import CAST_OP
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.passes.graph.node_info import is_view
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.modules import registration_hooks_as_before
from amp_graph.policy import Policy
from amp_graph.rewrite import rewrite


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    policy: Policy | str | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    fold_weights: bool = False,
) -> ExportedProgram:
    """Return ``model`` in mixed precision as an ``ExportedProgram`` with plain ATen operators and casts only.

    The program keeps the dtypes of inputs and outputs. The model is exported in its present mode; call
    ``model.eval()`` first for inference. The model itself does not change.

    args, kwargs: example inputs; their sizes are fixed unless ``dynamic_shapes`` says otherwise. policy: as for
    ``amp_graph.convert``. dynamic_shapes, strict: torch.export's. fold_weights: store weights that are only read in low
    precision in low precision, which makes the file about half as large and the program not trainable in fp32.

    Raises CaptureError (torch.export cannot capture the model), PassError and VerifyError (its graph cannot be written
    portably), PolicyError, ListError.
    """
    policy = Policy.parse(policy)
    refuse_what_is_no_model("export", model)
    refuse_converted("export", model)
    given = dict(kwargs or {})
    with torch.set_grad_enabled(model.training and torch.is_grad_enabled()):
        plain = _exported(model, args, given, dynamic_shapes, strict)
        made = rewrite(plain.module(check_guards=False), policy, portable=True)
        if fold_weights:
            store_low_weights(made)
        for node in made.graph.find_nodes(op="get_attr"):
            if not node.users:
                made.graph.erase_node(node)
        made.delete_all_unused_submodules()
        made.recompile()
        return _exported(made, args, given, dynamic_shapes, strict)


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, strict: bool
) -> ExportedProgram:
    with Attempt(AmpGraphError) as tried, registration_hooks_as_before():  # torch.export raises errors of many types
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)
    raise CaptureError(
        f"export: torch.export cannot capture {type(model).__name__}: {tried.reason[:300]}\n"
        "  legal: a model that torch.export.export(model, args, kwargs) captures\n"
        "  fix:   torch.export.draft_export(model, args, kwargs) says what to change in its forward"
    ) from tried.error


def store_low_weights(gm: GraphModule) -> None:
    """Replace each parameter and buffer that all its readers cast to one lower dtype by its copy in that dtype.

    A weight under several names is folded if this holds for all of them. Names stay.
    """
    held = ((attrgetter(str(node.target))(gm), node) for node in gm.graph.find_nodes(op="get_attr"))
    for old, nodes in grouped((one, node) for one, node in held if isinstance(one, torch.Tensor)).items():
        dtype = _only_dtype(nodes)
        if dtype is not None:
            new = old.detach().to(dtype)
            made = torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
            for node in nodes:
                path, _, name = str(node.target).rpartition(".")
                setattr(gm.get_submodule(path), name, made)
                _read_low(gm, node, dtype)


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
    return [one for user in node.users for one in (_readers(user) if _is_view(user) and user.users else [user])]


def _read_low(gm: GraphModule, node: Node, dtype: torch.dtype) -> None:
    """Remove the casts behind ``node``, a weight or a view of one, and record that it is in ``dtype``."""
    node.meta["val"] = value(node).to(dtype)
    for user in list(node.users):
        if user.target is CAST_OP:
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        else:
            _read_low(gm, user, dtype)
