"""Runs a model's loss once in fp32, to measure how much rounding each value would change the outputs.

Each output that the loss reads counts by the size of its gradient, and not by its direction: the gradient of the loss
is small where a loss is near its minimum, and terms of it cancel that do not cancel in the outputs.

Before: ``sample=lambda model: loss_fn(model(x), y)``. After: a ``Measured`` for each graph that the call captures. What
else is measured, by ``numerics``, takes graphs in the same way: ``with captured_by(model, policy, take): model(x)``, in
which ``take`` gets each graph of the call, and what it returns runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.conversion import Conversion
from amp_graph.capture.diagnostics import Diagnostics
from amp_graph.devices import device_of_model
from amp_graph.errors import CaptureError
from amp_graph.model_state import ModelState, restored
from amp_graph.passes.graph.fake_values import tensors
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.sensitivity import Measured, MeasureInfluence
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.policy import Policy
from amp_graph.rewrite import ready_to_plan

Sample = Callable[[Any], torch.Tensor]
Take = Callable[[GraphModule], Runner]
Sampled = tuple[Problem, Measured]  # one graph that a sample call captured, and its measurements


@contextmanager
def captured_by(
    model: torch.nn.Module, policy: Policy, take: Take, *, dynamic: bool | None = None, caller: str = ""
) -> Iterator[ModelState]:
    """Let ``take`` take the graphs of ``model`` under ``policy``; yield the state that is restored afterwards.

    Raises CaptureError if ``caller`` is given, which needs graphs, and none ran.
    """
    made = Conversion(model, in_fp32(policy), dynamic=dynamic, wrapped=model.__dict__.get("forward"))
    made.diagnostics = Diagnostics(model, silent=True)
    made.plain.in_fp32, made.captured.taker = True, take  # what has no graph runs in fp32 as well
    with torch.enable_grad():
        made.attach()
        try:
            before = ModelState(model)
            with restored(before):
                yield before
        finally:
            made.detach()
    if caller and not made.runs:
        why = "".join(f": {note}" for note in made.diagnostics.notes[:1])
        raise CaptureError(
            f"{caller}: no graph of {type(model).__name__} was captured, so nothing can be measured{why}\n"
            "  fix:   amp_graph.report(amp_graph.convert(model)) after a call says why"
        )


def in_fp32(policy: Policy) -> Policy:
    """Return ``policy`` for graphs that run as captured: what leaves the graphs runs in fp32 as well."""
    return replace(policy, level="O1", replay=False, calibration="", keep_ops=(), widen=False)


def measure(model: torch.nn.Module, policy: Policy, sample: Sample, dynamic: bool | None = None) -> list[Sampled]:
    """Return what one ``sample(model)`` and its backward, in fp32, measure in each graph of ``model``.

    The model is as before: ``ModelState``. Raises CaptureError if ``sample`` returns no loss, or one that does not come
    from ``model``; its own errors propagate.
    """
    try:
        return _measure(model, policy, sample, dynamic, through_inputs=True)
    except RuntimeError as error:
        if "requires_grad flags of leaf variables" not in str(error):
            raise
    # The model calls requires_grad_ on values, which fails if its inputs require gradients.
    return _measure(model, policy, sample, dynamic, through_inputs=False)


def _measure(
    model: torch.nn.Module, policy: Policy, sample: Sample, dynamic: bool | None, through_inputs: bool
) -> list[Sampled]:
    graphs: list[tuple[Problem, MeasureInfluence]] = []

    def take(gm: GraphModule) -> Runner:
        """Prepare one captured graph for planning; return a callable that runs it in fp32 and measures it."""
        problem = ready_to_plan(gm, replace(policy, level="O1"), device_of_model(model))
        left_alone = {id(b) for b in model.buffers()} if through_inputs else None
        measuring = MeasureInfluence(gm, problem.memory, left_alone)
        graphs.append((problem, measuring))

        def run(*args: Any) -> Any:
            results = measuring.run(*args)
            for one in tensors(results):
                if one.grad_fn is not None and one.numel() > 1:
                    one.register_hook(spread)
            return results

        return run

    with captured_by(model, policy, take, dynamic=dynamic):
        _differentiate(type(model).__name__, sample(model), [measuring for _, measuring in graphs])
    return [(problem, measuring.measured()) for problem, measuring in graphs]


def spread(grad: torch.Tensor) -> torch.Tensor:
    """Return random numbers of the size of ``grad``, the same ones in each run."""
    drawn = torch.Generator(grad.device).manual_seed(0)
    size = grad.square().mean().sqrt()
    return size * torch.randn(grad.shape, generator=drawn, device=grad.device, dtype=grad.dtype)


def _differentiate(model: str, loss: Any, graphs: Sequence[MeasureInfluence]) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shown = f"a tensor of {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise CaptureError(
            f"sample: it returned {shown}, which is not a loss to differentiate\n"
            "  legal: a function of the model that returns a scalar which requires grad\n"
            "  fix:   sample=lambda model: loss_fn(model(x), y)"
        )
    leaves = list({id(t): t for measuring in graphs for t in measuring.leaves}.values())
    if leaves:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    if not any(measuring.readings for measuring in graphs):
        raise CaptureError(
            f"sample: its loss does not come from any captured graph of {model}\n"
            "  legal: a function that calls the model it is given\n"
            "  fix:   sample=lambda model: loss_fn(model(x), y)"
        )
