"""Planning problems of captured graphs, and what a plan for them costs."""

from functools import cache

from amp_graph.passes.precision import plan_precision
from amp_graph.passes.precision.build_assignment import formulate
from amp_graph.passes.precision.machine_rates import MACHINES, read_machine
from amp_graph.passes.precision.plan_precision import PlanPrecision
from tests.passes.graphs import passes_until


def machine(name="cpu_bf16"):
    path = MACHINES / f"{name}.toml"
    return read_machine(path.read_text(), str(path))


def problems_of(run, visit=lambda problem, dtype: None):
    """The problems that are planned while ``run()`` runs; ``visit`` sees each before its graph is rewritten."""
    found = []
    choices = PlanPrecision._choices

    def kept(self, made):
        found.append((made.problem, made.dtype))
        visit(*found[-1])
        return choices(self, made)

    PlanPrecision._choices = kept
    try:
        run()
    finally:
        PlanPrecision._choices = choices
    return found


def problem_of(captured, policy="bf16"):
    """The problem of one captured graph, and its low dtype by name."""
    ((problem, dtype),) = problems_of(lambda: captured.through(passes_until(plan_precision.PlanPrecision, policy)))
    return problem, dtype


once_problem_of = cache(problem_of)  # the same for every machine


def formulated(captured, policy="bf16", on="cpu_bf16"):
    problem, dtype = once_problem_of(captured, policy)
    return formulate(problem, machine(on), dtype)
