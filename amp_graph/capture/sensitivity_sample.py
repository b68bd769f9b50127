"""Runs a model's loss once in fp32, to measure how much rounding each value would change the outputs.

Each output that the loss reads counts by the size of its gradient, and not by its direction: the gradient of the loss
is small where a loss is near its minimum, and terms of it cancel that do not cancel in the outputs.

Before: ``sample=lambda model: loss_fn(model(x), y)``. After: a ``Measured`` for each graph that the call captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.captured_graphs import CapturedGraphs
from amp_graph.capture.conversion import Conversion
from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.devices import device_of_model
from amp_graph.errors import CaptureError
from amp_graph.model_state import unchanged
from amp_graph.passes.graph.fake_values import tensors
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.sensitivity import Measured, MeasureInfluence
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.policy import Policy
from amp_graph.rewrite import ready_to_plan

Sample = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Sampled:
    """One graph that a sample call captured: its planning problem, and the measurements."""

    problem: Problem
    measured: Measured


@dataclass(eq=False)
class SampledGraphs(CapturedGraphs):
    """Graphs that run as captured, in fp32, and measure."""

    found: list[tuple[Problem, MeasureInfluence]] = field(default_factory=list)
    through_inputs: bool = True  # whether inputs without requires_grad get gradients, to be measured

    def take(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Prepare one captured graph for planning; return a callable that runs and measures it."""
        name_nodes(gm, self.model, self.forward)
        problem = ready_to_plan(gm, self.policy, device_of_model(self.model))
        buffers = {id(b) for b in self.model.buffers()} if self.through_inputs else None
        measuring = MeasureInfluence(gm, problem.memory, buffers)
        self.found.append((problem, measuring))

        def run(*args: Any) -> Any:
            self.runs += 1
            results = measuring.run(*args)
            for one in tensors(results):
                if one.grad_fn is not None and one.numel() > 1:
                    one.register_hook(spread)
            return results

        return run


def spread(grad: torch.Tensor) -> torch.Tensor:
    """Return random numbers of the size of ``grad``, the same ones in each run."""
    drawn = torch.Generator(grad.device).manual_seed(0)
    size = grad.square().mean().sqrt()
    return size * torch.randn(grad.shape, generator=drawn, device=grad.device, dtype=grad.dtype)


class Silent(Complaints):
    """Reports nothing: the conversion that follows reports."""

    def complain(self, what: str, causes: str = "", warned: bool = True, fix: str = "") -> None:
        """Ignore it."""


def measure(model: torch.nn.Module, policy: Policy, sample: Sample, dynamic: bool | None = None) -> list[Sampled]:
    """Return what one ``sample(model)`` and its backward, in fp32, measure in each graph of ``model``.

    The model is as before: ``ModelState``. Raises CaptureError
    if ``sample`` returns no loss, or one that does not come from ``model``; its own errors propagate.
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
    sampling, graphs = _sampling(model, policy, dynamic, through_inputs)
    with unchanged(model), torch.enable_grad():
        sampling.attach()
        try:
            _differentiate(sample(model), graphs)
        finally:
            sampling.detach()
    return [Sampled(problem, measuring.measured()) for problem, measuring in graphs.found]


def _sampling(
    model: torch.nn.Module, policy: Policy, dynamic: bool | None, through_inputs: bool
) -> tuple[Conversion, SampledGraphs]:
    """Return an unattached conversion that changes no precision, and the graphs that its calls will capture."""
    fp32 = replace(policy, level="O1")
    made = Conversion(model, fp32, dynamic=dynamic, wrapped=model.__dict__.get("forward"))
    return made, made.taken_by(SampledGraphs, Silent(model, strict=False), through_inputs=through_inputs)


def _differentiate(loss: Any, sampling: SampledGraphs) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shown = f"a tensor of {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise CaptureError(
            f"sample: it returned {shown}, which is not a loss to differentiate\n"
            "  legal: a function of the model that returns a scalar which requires grad\n"
            "  fix:   sample=lambda model: loss_fn(model(x), y)"
        )
    leaves = list({id(t): t for _, measuring in sampling.found for t in measuring.leaves}.values())
    if leaves:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    if not any(measuring.readings for _, measuring in sampling.found):
        raise CaptureError(
            f"sample: its loss does not come from any captured graph of {type(sampling.model).__name__}\n"
            "  legal: a function that calls the model it is given\n"
            "  fix:   sample=lambda model: loss_fn(model(x), y)"
        )
