"""Measure how sensitive the loss is to each read of a value, by one forward and backward in fp32.

Before: a graph, and a loss of its outputs. After: ``measured.readings["add", "linear_1"]``, the sum of
``(x * dL/dx)^2`` over the elements of ``add`` that ``linear_1`` reads. Times epsilon squared, this is to first order
the variance of the loss under independent relative roundings of ``x`` (P. Molchanov et al., CVPR 2019, use the same
measure for the importance of weights).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.graph.fake_values import has_eligible, is_eligible
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.precision.classify import is_conversion_target
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.sensitivity import Influence, influence_by_rule, sum_of_readings


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
        known = self._known(problem)
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
        return Influence(readings, values, "measured", unmeasured)

    def _known(self, problem: Problem) -> dict[tuple[Node, Node], float]:
        """Return the measured influence of the reads that ``problem`` has too."""
        edges = ((n, user) for n in problem.gm.graph.nodes if has_eligible(n) for user in n.users)
        return {(a, b): self.readings[a.name, b.name] for a, b in edges if (a.name, b.name) in self.readings}


def skeleton(gm: GraphModule) -> tuple[str, ...]:
    """Return the operations of a graph by name and target."""
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call") and not is_conversion_target(n)]
    return tuple(f"{n.name} {getattr(n.target, '__name__', n.target)}" for n in nodes)


class MeasureInfluence(Interpreter):
    """Run a graph unchanged, and record value times gradient of every fp32 value at each of its readers.

    ``readings`` is filled while the caller's backward runs. ``leaves``: the tensors to differentiate for. These are
    inputs and parameters, and also float inputs that need no gradient, except those in ``left_alone`` (ids; None
    means all of them).
    """

    def __init__(self, gm: GraphModule, memory: Memory, left_alone: Collection[int] | None = ()) -> None:
        super().__init__(gm)
        self.memory, self.left_alone = memory, left_alone
        self.readings: dict[tuple[str, str], float] = {}
        self.leaves: list[torch.Tensor] = []

    def measured(self) -> Measured:
        """Return the measurements so far."""
        return Measured(skeleton(self.module), dict(self.readings))  # type: ignore[arg-type]

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Let gradients flow to the graph's inputs."""
        given = super().placeholder(target, args, kwargs)
        if not isinstance(given, torch.Tensor) or not given.is_floating_point():
            return given
        alone = self.left_alone is None or id(given) in self.left_alone or self._is_written(self.node)
        if not given.requires_grad and not alone:
            given = given.detach().requires_grad_()
        self.leaves += [given] if given.is_leaf and given.requires_grad else []
        return given

    def run_node(self, n: Node) -> Any:
        """Record which node runs."""
        self.node = n
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[Any, Any]:
        """Give every reader its own alias, which receives the gradient of that read."""
        read = {source: self._watched(source, n) for source in n.all_input_nodes}
        args, kwargs = (map_arg(given, read.__getitem__) for given in (n.args, n.kwargs))
        return args, kwargs

    def _is_written(self, node: Node) -> bool:
        return self.memory.is_written(node)

    def _watched(self, source: Node, reader: Node) -> Any:
        given = self.env[source]
        if not is_eligible(given) or not given.requires_grad or not torch.is_grad_enabled():
            return given
        if self._is_written(source):  # a write to an alias would replace the alias's autograd node
            seen, size = given, given.detach().clone()
        else:
            seen, size = given.view_as(given), given.detach()
        if not seen.is_leaf:
            seen.register_hook(lambda grad: self._note((source.name, reader.name), size, grad))
        return seen

    def _note(self, pair: tuple[str, str], size: torch.Tensor, grad: torch.Tensor) -> None:
        found = (size.double() * grad.double()).square().nan_to_num(0.0, 0.0).sum().item()  # masks contain inf
        self.readings[pair] = self.readings.get(pair, 0.0) + found
