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
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.policy import Policy

Take = Callable[[GraphModule], Runner]


@dataclass(eq=False)
class TakenGraphs(CapturedGraphs):
    """Graphs that a function takes."""

    taker: Take | None = field(default=None)

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
    """Let ``take`` take the graphs of ``model`` under ``policy``; buffers and random state are restored afterwards."""
    fp32 = in_fp32(policy)
    made = Conversion(model, fp32, wrapped=model.__dict__.get("forward"))
    made.said = Silent(model, strict=False)
    made.captured = graphs = TakenGraphs(
        model, made.forward, fp32, "eager", (), made.escaped, made.log, made.said, taker=take
    )
    with unchanged(model), torch.enable_grad():
        made.attach()
        try:
            yield graphs
        finally:
            made.detach()


def in_fp32(policy: Policy) -> Policy:
    """Return ``policy`` for graphs that run as captured: what leaves the graphs runs in fp32 as well."""
    return replace(policy, level="O1", escaped="fp32", replay="", calibration="", keep_ops=(), widen=False)


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Restore the values of buffers, and the state of random number generators."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def plain_model(caller: str, model: Any) -> torch.nn.Module:
    """Return the model to measure: the wrapped one of a data-parallel wrapper, whose processes measure their own.

    Raises CaptureError for what is no model, or is converted already.
    """
    model = model.module if isinstance(model, WRAPPERS) else model
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"{caller}: a {type(model).__name__} is not a torch.nn.Module\n  fix:   amp_graph.{caller}(model, batches)"
        )
    if conversion_of(model) is not None:
        raise CaptureError(
            f"{caller}: the model is converted, and is measured as it was written\n"
            f"  fix:   amp_graph.revert(model), amp_graph.{caller}(model, batches), amp_graph.convert(model)"
        )
    return model
