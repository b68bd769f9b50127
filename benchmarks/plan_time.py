"""How long planning takes: painting and minimum cut side by side, on one residual stream of many operations.

    python benchmarks/plan_time.py [operations] [policy]

The first plan also identifies and classifies the operations; those times are left out of both columns.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.graph.propagate_fake_values import record_values
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.passes.precision.build_assignment import Formulation, formulate
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.passes.precision.min_cut_planner import mincut
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.precision_assignment import cheapest
from amp_graph.passes.precision.rule_based_planner import paint
from amp_graph.policy import Policy

ROUNDS = 5


class Stream(nn.Module):
    """Blocks on one residual stream; eight operations a block, most of them the planner's to choose."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        x = self.down(F.relu(self.up(x)))
        for i in range(self.blocks):
            h = F.layer_norm(x, (64,), self.norm.weight, self.norm.bias)
            h = F.gelu(F.linear(h, self.up.weight, self.up.bias))
            h = F.linear(h * 1.5, self.down.weight, self.down.bias)
            x = x + torch.tanh(h)
            x = torch.softmax(x, -1) if i % 10 == 9 else x * 0.5
        return x.exp()


def problem_of(operations: int, policy: Policy) -> Problem:
    """Return the planning problem of a stream of that many operations."""
    gm = torch.fx.symbolic_trace(Stream(operations // 8))
    record_values(gm, (torch.randn(16, 64, requires_grad=True),))
    adopt_values(gm)
    passes = pipeline(Phase.CAPTURED, policy.pipeline_options("cpu"))
    last = next(i for i, p in enumerate(passes) if isinstance(p, PlanPrecision))
    found: list[Problem] = []
    plan = passes[last]
    assert isinstance(plan, PlanPrecision), "the plan is a pass of every policy"
    choices = plan._choices

    def kept(made: Formulation) -> dict:
        found.append(made.problem)
        return choices(made)

    object.__setattr__(plan, "_choices", kept)
    run_passes(gm, passes[: last + 1], checked=False)
    return found[0]


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(operations: str = "10000", policy: str = "bf16,accuracy=fast") -> None:
    """Print the medians."""
    torch.set_num_threads(1)
    problem = problem_of(int(operations), Policy.parse(policy))
    machine = machine_for("cpu")
    made = formulate(problem, machine, "bfloat16")
    task = made.task()
    rows: dict[str, Callable[[], object]] = {
        "painting": lambda: paint(problem),
        "minimum cut, in all": lambda: mincut(formulate(problem, machine, "bfloat16")),
        "  the cut alone": lambda: cheapest(task),
    }
    free = sum(made.is_free(node) for node in made.of)
    print(f"{len(made.of)} operations, {free} free, {machine.name}, torch {torch.__version__}, {policy}")
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, call in rows.items():
            times[name].append(seconds(call))
    for name, all_of_it in times.items():
        print(f"{name:22s} {statistics.median(all_of_it):.3f} s [{min(all_of_it):.3f}-{max(all_of_it):.3f}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
