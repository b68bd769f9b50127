"""Measures the ranges of a model's values and gradients in fp32, on batches.

Before: a model and forty batches. After: ``calibrate(model, batches, loss_fn)``, a ``Calibration``; a policy that names
its file keeps in fp32 what the low precision cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.capture.sensitivity_sample import captured_by, in_fp32
from amp_graph.devices import device_of_model
from amp_graph.errors import CalibrationError
from amp_graph.lists import OpClass
from amp_graph.model_state import unwritten
from amp_graph.numerics.batches import (
    LossFn,
    checked,
    differentiate,
    output_and_loss,
    refuse_infinite,
    to_measure,
)
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.calibration.calibration_file import NodeRange
from amp_graph.passes.calibration.node_keys import node_keys
from amp_graph.passes.calibration.ranges import Range, range_of
from amp_graph.passes.graph.bodies import bodies_of
from amp_graph.passes.graph.fake_values import tensors
from amp_graph.passes.graph.meta_keys import INSIDE
from amp_graph.passes.graph.observe import GradientSink, Observer
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.policy import Policy
from amp_graph.rewrite import has_values, ready_to_plan

FREE = (OpClass.ALLOW, OpClass.FOLLOW, OpClass.NEUTRAL, OpClass.FP32_INSIDE, OpClass.PROMOTE)


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    policy: Policy | str | None = None,
) -> Calibration:
    """Measure the range of every value, and of its gradient, over ``batches`` in fp32; return a ``Calibration``.

    model: any model that ``convert`` takes, not converted; it is as before afterwards: parameters, gradients, buffers,
    random state, mode. Its mode (train or eval) is the one that is measured.
    batches: an iterable of batches as ``TrainStep`` takes them, ``(inputs, *targets)``, at any sizes that the model
    takes. loss_fn: called as ``loss_fn(model(inputs), *targets)``, returns a tensor of one element. Without it a batch
    is the model's arguments, and the loss is what the model returns, or has in ``.loss`` or ``["loss"]``; if there is
    none, only forward is measured.
    policy: the policy for which the graphs are prepared; None for "fp16".

    The loss is not scaled, so gradients are as in fp32 training. Save the result with ``.save("run.json")``, and name
    it in a policy: ``"fp16,calibration=run.json"``. ``.merge`` joins those of several processes.

    Raises CalibrationError (no batches, batches of another structure, a loss that is not finite), CaptureError (the
    model is converted, or nothing of it was captured), PolicyError, ListError. Source of the idea: the statistics of
    Paddle's ``amp.debugging`` and the range rules of modelopt, which keep an operation by its forward values alone.
    """
    model, asked = to_measure("calibrate", model, loss_fn, "fp16" if policy is None else policy)
    measuring = Measuring(in_fp32(asked), device_of_model(model))
    with captured_by(model, asked, measuring.take, caller="calibrate"):
        for number, batch in checked("calibrate", batches):
            with unwritten(batch):
                _, loss = output_and_loss(model, loss_fn, batch)
                refuse_infinite("calibrate", loss, number)
                measuring.has_gradients |= differentiate(model, loss, measuring.leaves)
            measuring.end_batch()
    if not measuring.values:
        raise CalibrationError("calibrate: no operation has a floating-point value\n  fix:   calibrate another model")
    return Calibration(measuring.values, type(model).__name__, str(asked), measuring.batches, measuring.has_gradients)


@dataclass(eq=False)
class Measuring:
    """Measures the graphs of a model, which ``captured_by`` hands to ``take``.

    ``now``: the ranges of the batch so far, by part; ``values``: of those before.
    """

    policy: Policy
    device: str | None
    values: dict[str, NodeRange] = field(default_factory=dict)
    batches: int = 0
    has_gradients: bool = False
    now: dict[str, dict[str, Range]] = field(default_factory=dict)
    free: dict[str, bool] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)

    def take(self, gm: GraphModule) -> Runner:
        """Prepare a captured graph as for planning; return what runs and measures it, and the graphs inside it."""
        problem = ready_to_plan(gm, self.policy, self.device)
        keys = node_keys(gm)
        self.free |= {key: node in problem.classes and problem.classes[node].cls in FREE for node, key in keys.items()}
        bodies = {body.name: self.take(body.graph) for body in bodies_of(gm) if has_values(body.graph)}
        sink = _GraphSink(self.now, keys)
        observer = Observer(gm, sink, problem.memory, bodies)

        def run(*args: Any) -> Any:
            sink.peaks.clear()
            result = observer.run(*args)
            self.leaves += observer.leaves if INSIDE not in gm.meta else []
            return result

        return run

    def end_batch(self) -> None:
        """Add what the batch has shown."""
        self.batches += 1
        for key, found in self.now.items():
            if "value" in found:
                one = NodeRange(**found, free=self.free[key])
                self.values[key] = self.values[key] + one if key in self.values else one
        self.now.clear()


@dataclass(eq=False)
class _GraphSink(GradientSink):
    """Takes the values and gradients of one graph."""

    now: dict[str, dict[str, Range]]
    keys: dict[Node, str]
    peaks: dict[Node, Range] = field(default_factory=dict)

    def value(self, node: Node, result: Any) -> None:
        found = range_of(tensors(result))
        if found is not None:
            self.peaks[node] = found.peak
        self._note(node, "value", found)
        for source in node.all_input_nodes:
            self._note(node, "reads", self.peaks.get(source))

    def gradient(self, node: Node, grad: torch.Tensor, part: int) -> None:
        self._note(node, "gradient", range_of([grad]))

    def returned(self, reader: Node, source: Node, grad: torch.Tensor) -> None:
        found = range_of([grad])
        self._note(reader, "gives", None if found is None else found.peak)

    def _note(self, node: Node, part: str, found: Range | None) -> None:
        """Add a range of this batch to those of the operation."""
        if node in self.keys and found is not None:
            one = self.now.setdefault(self.keys[node], {})
            one[part] = one[part].beside(found) if part in one else found
