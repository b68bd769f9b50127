"""Plans one call of a model on fake tensors: what ``amp_graph.convert`` would decide, with no value read.

Before: a ``Sketch``. After: 13 casts, 0.4 MB, 1.8 times the speed of float32 on this machine.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from torch.fx import GraphModule

from amp_graph.audit.speed.model_sketch import Sketch
from amp_graph.capture.sensitivity_sample import captured_by
from amp_graph.devices import device_of
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.precision.build_assignment import formulate
from amp_graph.passes.precision.machine_rates import SIZES, machine_for
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.precision_assignment import cheapest
from amp_graph.passes.precision.predict_time import predicted
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.passes.torch_compat.fake import numel
from amp_graph.policy import Policy
from amp_graph.rewrite import copy_graph, ready_to_plan

PICOSECOND = 1e-12


@dataclass(frozen=True)
class Planned:
    """The sums over all graphs of a call: casts of forward and their bytes, and predicted seconds with backward.

    ``seconds``: of the plan; ``autocast``, ``full``: of autocast's and of float32's.
    """

    machine: str
    casts: int = 0
    bytes: int = 0
    seconds: float = 0.0
    autocast: float = 0.0
    full: float = 0.0

    def __add__(self, other: Planned) -> Planned:
        """Return the sums of both."""
        return Planned(
            self.machine, self.casts + other.casts, self.bytes + other.bytes, self.seconds + other.seconds,
            self.autocast + other.autocast, self.full + other.full,
        )  # fmt: skip


def planned(sketch: Sketch, policy: Policy) -> Planned:
    """Return the figures of the plan of ``sketch`` under ``policy``; CaptureError if nothing of it is captured."""
    found: list[Planned] = []

    def take(gm: GraphModule) -> Runner:
        device = device_of(gm)
        found.append(_planned(ready_to_plan(copy_graph(gm), policy, device), policy, device))
        run: Runner = gm.forward
        return run

    with captured_by(sketch.model, policy, take, caller="audit"), sketch.mode:
        sketch.model(*sketch.args, **sketch.kwargs)
    return functools.reduce(operator.add, found)


def _planned(problem: Problem, policy: Policy, device: str) -> Planned:
    machine = machine_for(device)
    dtype = str(policy.torch_dtype(device)).removeprefix("torch.")
    made = formulate(problem, machine, dtype)
    low = cheapest(made.task(skip=policy.leaves == "true"))
    times = predicted(made, low)
    cast = [sum(map(numel, tensors(captured(node)))) for node, term in made.casts() if term.is_due(low)]
    return Planned(
        machine.name, len(cast), sum(cast) * (SIZES["float32"] + SIZES[dtype]), times.planned * PICOSECOND,
        times.autocast * PICOSECOND, times.full * PICOSECOND,
    )  # fmt: skip
