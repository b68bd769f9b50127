"""The optimal planner: finds the plan of least cost that the accuracy permits, by a minimum cut.

Before: a gelu between two matmuls. After: low, "20.1 us cheaper than full, between linear and linear_1".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.precision.build_assignment import Formulation, Operands, formulate
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.machine_rates import Machine
from amp_graph.passes.precision.planning_problem import FULL, LOW, Choice, Problem
from amp_graph.passes.precision.precision_assignment import Cast, Kept, Promotion, Task, cheapest


def mincut(problem: Problem, machine: Machine, dtype: str, skip: bool = False) -> dict[Node, Choice]:
    """Choose a precision for every classified node of ``problem``, at the least cost on ``machine``.

    ``skip``: leave an ``allow`` operation in full precision where its casts cost more than it gains.
    """
    made = formulate(problem, machine, dtype, skip)
    task = made.task()
    low = cheapest(task)
    return choices(made, low, Prices(task, low))


def choices(made: Formulation, low: frozenset[int], prices: Prices) -> dict[Node, Choice]:
    """Return the choices, with reasons, of the assignment in which the variables in ``low`` are low."""
    return {node: _choice(node, made, low, prices) for node in made.of}


def _choice(node: Node, made: Formulation, low: frozenset[int], prices: Prices) -> Choice:
    """Return the choice for ``node``."""
    kind, painted, i = made.problem.classes[node], made.painted[node], made.of[node]
    if node in made.tied:
        return painted if (painted.precision == LOW) == (i in low) else _tied(node, kind, LOW if i in low else FULL)
    if not made.is_free(node):
        return painted
    between = _between(node)
    if i in low:
        return replace(painted, reason=f"{painted.reason}; {prices.told(i, 'full')}{between}")
    given = made.operands(node)
    wants = dict.fromkeys((*given.moved, *given.beside), FULL)
    if given.promoted and all(made.holds[n] in low for n in given.promoted):
        wants[given.promoted[0]] = FULL  # the kernel promotes the others
    return Choice(FULL, _why_full(kind, prices.told(i, "low"), given, made, low) + between, wants)


def _tied(node: Node, kind: Classification, precision: str) -> Choice:
    """Return the choice of a node that writes to, aliases, or copies the dtype of a value in ``precision``."""
    if kind.conversion:
        return Choice(precision, kind.why)
    sources = [n for n in node.all_input_nodes if n in kind.applies and n not in kind.written]
    wants = {} if kind.mixed else {n: precision for n in sources if is_eligible(captured(n))}
    what = "writes to" if kind.written else "aliases"
    return Choice(precision, f"{what} a {precision}-precision value, which is never cast", wants)


def _why_full(kind: Classification, told: str, given: Operands, made: Formulation, low: frozenset[int]) -> str:
    if kind.cls is OpClass.ALLOW and isinstance(made.problem.accuracy, str):
        casts = sum(made.holds[n] not in low for n in given.moved)
        return f"not profitable: low precision with {casts} casts would take longer; {told}"
    return f"{kind.why}; {told}"


def time_text(picoseconds: int) -> str:
    """Format a number of picoseconds, as in ``20.1 us``."""
    scale, unit = next((s, u) for s, u in ((1e9, "ms"), (1e6, "us"), (1e3, "ns"), (1.0, "ps")) if picoseconds >= s)
    return f"{picoseconds / scale:.3g} {unit}"


def _between(node: Node) -> str:
    before = ", ".join(_names(n for n in node.all_input_nodes if is_eligible(captured(n))))
    after = ", ".join(_names(node.users))
    return f", between {before or 'nothing'} and {after or 'nothing'}"


def _names(nodes: Iterable[Node]) -> list[str]:
    names = [n.name for n in nodes]
    return names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} others"]


class Prices:
    """The change of cost if one variable alone took the other precision."""

    def __init__(self, task: Task, low: frozenset[int]) -> None:
        self.task, self.low = task, low
        self.terms: dict[int, list[Cast | Promotion | Kept]] = {}
        for term in task.terms:
            for i in set(term.variables):
                self.terms.setdefault(i, []).append(term)
        self.held = {a for a, b in task.limits if b not in low} | {b for a, b in task.limits if a in low}

    def of(self, i: int) -> int | None:
        """Return how much the cost rises if ``i`` alone takes the other precision; None if it may not."""
        if i in self.held:
            return None
        other = self.low ^ {i}
        own = self.task.full[i] - self.task.low[i] if i in self.low else self.task.low[i] - self.task.full[i]
        return own + sum(term.cost(other) - term.cost(self.low) for term in self.terms.get(i, ()))

    def told(self, i: int, other: str) -> str:
        """Say how much cheaper the choice is than the other precision, for this operation alone."""
        saved = self.of(i)
        if saved is None:
            return f"takes the precision of its neighbours, which are cheaper so than {other}"
        return f"{time_text(saved)} cheaper than {other}" if saved else f"as cheap as {other}"
