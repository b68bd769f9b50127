"""How sensitive the loss is to each read of a value: estimated by rule, or measured by a forward and backward in fp32.

Before: a classified graph. After: ``influence.readings[add, linear_1] == 0.5``, for ``linear_1`` reading ``add``.

Roundings are assumed independent and relative, so their variances add, weighted by influence (N. Higham and T. Mary,
SIAM J. Sci. Comput. 41(5), 2019). The epsilon of the low dtype is left out, as only plans of one dtype are compared.
Measured, the influence is the sum of ``(x * dL/dx)^2`` over the elements of ``x`` that are read: times epsilon squared,
to first order the variance of the loss under independent relative roundings of ``x`` (P. Molchanov et al., CVPR 2019,
use the same measure for the importance of weights).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.graph.fake_values import captured, has_eligible, is_eligible, tensors
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.observe import Hook, Observer, Sink
from amp_graph.passes.precision.classify import Classification, is_conversion_target
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.rule_based_planner import ADDITIONS
from amp_graph.passes.torch_compat.fake import numel

ONE_NUMBER = "measured on a result of one number"


@dataclass(frozen=True)
class Influence:
    """The effect of rounding a value for one of its readers (``readings``), or for all of them (``values``).

    The unit is arbitrary. ``origin``: "by rule", "measured", or ``ONE_NUMBER``. ``unmeasured``: nodes for which some
    rounding has no measured effect, as no gradient reaches it.
    """

    readings: Mapping[tuple[Node, Node], float]
    values: Mapping[Node, float]
    origin: str = "by rule"
    unmeasured: frozenset[Node] = frozenset()


def influence_by_rule(problem: Problem, unused: Collection[Node] = ()) -> Influence:
    """Return the influence of each read: its share of the outputs, ``unused`` ones excepted.

    An output has influence 1. An operation passes its influence on to its operands: a sum in proportion to their mean
    squares (a matmul or norm makes 1, a sum adds up), any other operation evenly. Parameters and inputs get as much as
    each other operand. So a value on a residual branch has the share of its branch, the residual stream all of it.
    """
    sizes = _sizes(problem)
    found: dict[tuple[Node, Node], float] = {}
    total: dict[Node, float] = {}
    for node in reversed(problem.gm.graph.nodes):
        total[node] = 1.0 if node.op == "output" else sum_of_readings(node, found, problem)
        given = [n for n in node.all_input_nodes if has_eligible(n)]
        for source, share in zip(given, _shares(node, given, problem.classes.get(node), sizes), strict=True):
            found[source, node] = 0.0 if node.op == "output" and source in unused else share * total[node]
    return Influence(found, total)


def sum_of_readings(node: Node, readings: Mapping[tuple[Node, Node], float], problem: Problem) -> float:
    """Return the influence of a value: the sum over its reads.

    A value that is written in place counts all later reads of its memory, by the alias with the largest sum.
    """
    memory = problem.memory
    if not memory.is_written(node):
        return sum(readings.get((node, user), 0.0) for user in node.users)
    at = memory.order[node]
    same = [n for n in memory.order if memory.storages[n] & memory.storages[node]]
    return max(sum(readings.get((n, u), 0.0) for u in n.users if memory.order[u] > at) for n in same)


def _shares(node: Node, given: list[Node], kind: Classification | None, sizes: Mapping[Node, float]) -> list[float]:
    """Return the share of the influence of ``node`` that each of its operands gets."""
    if node.op == "output":
        return [1.0] * len(given)
    if _is_sum(kind) and len(given) > 1:
        return [sizes[source] / sizes[node] for source in given]
    inner = sum(source.op not in ("placeholder", "get_attr") for source in given)
    return [1.0 / max(1, inner)] * len(given)


def _sizes(problem: Problem) -> dict[Node, float]:
    """Return the estimated mean square of each value's elements; that of a matmul's result is the unit."""
    sizes: dict[Node, float] = {}
    for node in problem.gm.graph.nodes:
        kind = problem.classes.get(node)
        given = [n for n in node.all_input_nodes if has_eligible(n)]
        moves = is_part(node) or (kind is not None and kind.cls in (OpClass.FOLLOW, OpClass.NEUTRAL))
        if _is_sum(kind) and given:
            sizes[node] = sum(sizes[n] for n in given)
        else:
            sizes[node] = max((sizes[n] for n in given), default=1.0) if moves else 1.0
    return sizes


def _is_sum(kind: Classification | None) -> bool:
    return kind is not None and bool(kind.names) and set(kind.names) <= ADDITIONS


@dataclass(frozen=True)
class Measured:
    """The influence of each read in one graph, by the names of value and reader.

    ``skeleton``: the operations and their names, which another graph must have in common with this one. Sizes may
    differ, and so may conversions of inputs (parameters that are stored in low precision).
    """

    skeleton: tuple[str, ...]
    readings: Mapping[tuple[str, str], float]

    def of(self, problem: Problem) -> Influence | None:
        """Return the influence of the reads in ``problem``, or None if its graph has another skeleton.

        Reads that no gradient reaches get their influence by rule, in the unit of the measured ones, and are named:
        no plan may add a rounding to them. Outputs that the loss does not use, and nodes that only they need, get none.
        """
        if skeleton(problem.gm) != self.skeleton or not any(self.readings.values()):
            return None
        edges = ((n, user) for n in problem.gm.graph.nodes if has_eligible(n) for user in n.users)
        known = {(a, b): self.readings[a.name, b.name] for a, b in edges if (a.name, b.name) in self.readings}
        end = problem.gm.graph.output_node()
        unused = [n for n in end.all_input_nodes if (n, end) not in known]
        rule = influence_by_rule(problem, unused).readings
        ruled = sum(rule[pair] for pair in known)
        unit = sum(known.values()) / ruled if ruled else 0.0
        readings = {pair: known.get(pair, unit * part) for pair, part in rule.items()}
        values: dict[Node, float] = {}
        for node in reversed(problem.gm.graph.nodes):
            values[node] = sum_of_readings(node, readings, problem)
            if is_part(node):
                readings[node.all_input_nodes[0], node] = values[node]
        unmeasured = frozenset(b for (a, b), part in rule.items() if part and (a, b) not in known and b is not end)
        # The error of one number is one draw, which its expected size does not bound.
        many = any(numel(t) > 1 for a, b in known if b is end for t in tensors(captured(a)))
        return Influence(readings, values, "measured" if many else ONE_NUMBER, unmeasured)


def skeleton(gm: GraphModule) -> tuple[str, ...]:
    """Return the operations of a graph by name and target."""
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call") and not is_conversion_target(n)]
    return tuple(f"{n.name} {getattr(n.target, '__name__', n.target)}" for n in nodes)


class MeasureInfluence(Sink):
    """Runs a graph unchanged, and records value times gradient of every fp32 value at each of its readers.

    ``readings`` is filled while the caller's backward runs. ``leaves``: the tensors to differentiate for, of all runs.
    These are inputs and parameters, and also float inputs that need no gradient, except those in ``left_alone`` (ids;
    None means all of them).
    """

    def __init__(self, gm: GraphModule, memory: Memory, left_alone: Collection[int] | None = ()) -> None:
        self.memory, self.left_alone = memory, left_alone
        self.readings: dict[tuple[str, str], float] = {}
        self.leaves: list[torch.Tensor] = []
        self._gm = gm

    def run(self, *args: Any) -> Any:
        """Run the graph once."""
        return Observer(self._gm, self, self.memory).run(*args)

    def measured(self) -> Measured:
        """Return the measurements so far."""
        return Measured(skeleton(self._gm), dict(self.readings))

    def given(self, node: Node, value: Any) -> Any:
        """Let gradients flow to the graph's inputs."""
        if node.op != "placeholder" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        alone = self.left_alone is None or id(value) in self.left_alone or self.memory.is_written(node)
        if not value.requires_grad and not alone:
            value = value.detach().requires_grad_()
        self.leaves += [value] if value.is_leaf and value.requires_grad else []
        return value

    def of_read(self, reader: Node, source: Node, value: torch.Tensor, is_written: bool) -> Hook | None:
        """Watch the reads of fp32 values."""
        if not is_eligible(value):
            return None
        size = value.detach().clone() if is_written else value.detach()
        return partial(self._note, (source.name, reader.name), size)

    def _note(self, pair: tuple[str, str], size: torch.Tensor, grad: torch.Tensor) -> None:
        found = (size.double() * grad.double()).square().nan_to_num(0.0, 0.0).sum().item()  # masks contain inf
        self.readings[pair] = self.readings.get(pair, 0.0) + found
