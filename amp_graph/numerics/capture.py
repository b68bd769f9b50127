"""Captures the graphs of a model that stays as it is: each goes to a function, which returns what runs it.

Before: a model. After: ``with captured_by(model, policy, take): model(x)``, in which ``take(gm)`` gets each graph with
its nodes named, and the callable that it returns runs in its place. Nothing of the model has changed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.captured_graphs import CapturedGraphs
from amp_graph.capture.conversion import WRAPPERS, Conversion, conversion_of
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.capture.sensitivity_sample import Silent
from amp_graph.errors import CaptureError
from amp_graph.model_state import ModelState, restored
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.passes.torch_compat.module_attributes import uninitialized
from amp_graph.policy import Policy

Take = Callable[[GraphModule], Runner]


@dataclass(eq=False)
class TakenGraphs(CapturedGraphs):
    """Graphs that a function takes. ``before``: the state of the model when its graphs began to be taken."""

    taker: Take | None = field(default=None)
    before: ModelState | None = field(default=None)

    def take(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Name the nodes of one captured graph, and let the taker return what runs it."""
        assert self.taker is not None, "set where this is made"
        name_nodes(gm, self.model, self.forward)
        run = self.taker(gm)

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        return counted


@contextmanager
def captured_by(model: torch.nn.Module, policy: Policy, take: Take) -> Iterator[TakenGraphs]:
    """Let ``take`` take the graphs of ``model`` under ``policy``; the model is restored afterwards: ``ModelState``."""
    made = Conversion(model, in_fp32(policy), wrapped=model.__dict__.get("forward"))
    graphs = made.taken_by(TakenGraphs, Silent(model, strict=False), taker=take)
    with torch.enable_grad():
        made.attach()
        try:
            graphs.before = ModelState(model)
            with restored(graphs.before):
                yield graphs
        finally:
            made.detach()


def in_fp32(policy: Policy) -> Policy:
    """Return ``policy`` for graphs that run as captured: what leaves the graphs runs in fp32 as well."""
    return replace(policy, level="O1", replay="false", calibration="", keep_ops=(), widen=False)


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
