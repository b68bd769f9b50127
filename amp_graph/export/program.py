"""Export a model in mixed precision as an ``ExportedProgram`` of plain ATen operators.

Before: ``export(model, (x,), policy="fp16")``. After: a program that ``torch.export.save`` writes and that
``torch.export.load`` reads in a process without amp_graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.export.fold_weights import fold_weights as fold
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
    _refuse(model)
    given = dict(kwargs or {})
    with torch.set_grad_enabled(model.training and torch.is_grad_enabled()):
        module = _exported(model, args, given, dynamic_shapes, strict).module(check_guards=False)
        made = rewrite(module, policy, portable=True)
        if fold_weights:
            fold(made)
        _drop_unread(made)
        made.recompile()
        return _exported(made, args, given, dynamic_shapes, strict)


def _refuse(model: Any) -> None:
    """Raise for what is not a model, and for one that amp_graph has converted already."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"export: {type(model).__name__} is not a torch.nn.Module\n  legal: a model, with example inputs\n"
            "  fix:   export(model, (x,), policy='fp16')"
        )
    if conversion_of(model) is not None:
        raise CaptureError(
            f"export: {type(model).__name__} is converted by amp_graph.convert already\n"
            "  legal: the model as it was before\n  fix:   export(amp_graph.revert(model), args, policy='bf16')"
        )


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, strict: bool
) -> ExportedProgram:
    try:
        with registration_hooks_as_before():
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)
    except AmpGraphError:
        raise
    except Exception as error:  # torch.export raises errors of many types
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise CaptureError(
            f"export: torch.export cannot capture {type(model).__name__}: {type(error).__name__}: {lines[0][:300]}\n"
            "  legal: a model that torch.export.export(model, args, kwargs) captures\n"
            "  fix:   torch.export.draft_export(model, args, kwargs) says what to change in its forward"
        ) from error


def _drop_unread(gm: GraphModule) -> None:
    """Erase reads of parameters and buffers that nothing uses, with what holds them."""
    for node in list(gm.graph.nodes):
        if node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
