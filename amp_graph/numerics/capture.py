"""Captures the graphs of a model that stays as it is: each goes to a function, which returns what runs it.

Before: a model. After: ``with captured_by(model, policy, take): model(x)``, in which ``take(gm)`` gets each graph with
its nodes named, and the callable that it returns runs in its place. Nothing of the model has changed afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_graph.capture.conversion import WRAPPERS, conversion_of
from amp_graph.capture.sensitivity_sample import TakenGraphs as TakenGraphs
from amp_graph.capture.sensitivity_sample import captured_by as captured_by
from amp_graph.capture.sensitivity_sample import in_fp32 as in_fp32
from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.modules import uninitialized


def plain_model(caller: str, model: Any) -> torch.nn.Module:
    """Return the model to measure: the wrapped one of a data-parallel wrapper, whose processes measure their own.

    Raises CaptureError for what is no model, cannot be run, or is converted already.
    """
    model = model.module if isinstance(model, WRAPPERS) else model
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"{caller}: a {type(model).__name__} is not a torch.nn.Module\n  fix:   amp_graph.{caller}(model, batches)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{caller}: {type(model).__name__} is a scripted module, which has no Python forward to capture\n"
            f"  fix:   amp_graph.{caller} of the model that torch.jit.script was given"
        )
    refuse_what_cannot_run(caller, model)
    if conversion_of(model) is not None:
        raise CaptureError(
            f"{caller}: the model is converted, and is measured as it was written\n"
            f"  fix:   amp_graph.revert(model), amp_graph.{caller}(model, batches), amp_graph.convert(model)"
        )
    return model


def refuse_what_cannot_run(caller: str, model: torch.nn.Module) -> None:
    """Raise CaptureError for a model whose parameters hold no values, and in inference mode."""
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            f"{caller}: called under torch.inference_mode(), which disables gradients\n  fix:   call it outside"
        )
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = uninitialized(named)
    if lazy:
        raise CaptureError(
            f"{caller}: {len(lazy)} parameters are not initialized, the first is {lazy[0]}; the call that initializes "
            "them would change the model\n  fix:   call the model once on a batch before"
        )
    empty = [name for name, t in named if t.is_meta]
    if empty:
        raise CaptureError(
            f"{caller}: {len(empty)} tensors are on the meta device and hold no values, the first is {empty[0]}\n"
            "  fix:   model.to_empty(device='cpu'), then load its weights"
        )
