"""Decide the precision of every value, with a reason; change nothing else.

Before: a captured graph. After: ``node.meta[MARK]`` is a ``Mark`` on every node that computes on floats.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass
from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.calibration.calibration import kept_full, unmatched
from amp_graph.passes.calibration.node_keys import node_keys, unmatched_keys
from amp_graph.passes.graph import aliasing, node_info
from amp_graph.passes.graph.fake_values import captured, fake_mode_of, is_eligible, tensors, value
from amp_graph.passes.graph.identify_ops import is_tensor_call
from amp_graph.passes.graph.meta_keys import (
    BUDGET,
    CAST,
    LEFT_ALONE,
    LOW_DTYPE,
    MARK,
    PREDICTED,
    REGION,
    UNCALIBRATED,
    UNKEPT,
    WISH,
)
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.precision.build_assignment import Formulation, formulate, low_of
from amp_graph.passes.precision.classify import Classification, classified
from amp_graph.passes.precision.conditioning import POSITIONS, carriers_of_positions
from amp_graph.passes.precision.error_budget_planner import ErrorBudget
from amp_graph.passes.precision.fp32_operands import RETURNED, left_full, returned_probabilities, trained_in_fp32
from amp_graph.passes.precision.machine_rates import Machine, class_of, machine_for
from amp_graph.passes.precision.min_cut_planner import choices, mincut
from amp_graph.passes.precision.planning_problem import AS_CAPTURED, FULL, LOW, Choice, Problem
from amp_graph.passes.precision.predict_time import left_alone, predicted
from amp_graph.passes.precision.views import OF_A_WEIGHT, READ_BY_STRIDES, read_by_strides, views_of_weights

MASKED = frozenset({"aten.softmax", "aten._softmax", "aten.scaled_dot_product_attention"})


@dataclass(frozen=True, kw_only=True)
class Mark(Choice):
    """The plan for one node: the planner's choice, and what it was made for.

    ``key``: the node's key as ``keep_ops`` takes it. ``cls``, ``origin``, ``ops``, ``written``: of its classification.
    """

    key: str
    cls: OpClass
    origin: str
    ops: tuple[str, ...]
    listed: bool
    written: frozenset[Node]


@dataclass(frozen=True)
class PlanPrecision(Pass):
    """Marks every value with a precision and a reason. Changes no value. Exactness: bit-exact.

    The lists decide for the operations that they name. ``planner`` decides for the others: "mincut" takes the plan of
    least cost on this machine that the rule-based planner permits, "paint" takes that of the rule-based planner.

    ``leaves``: "true": "mincut" leaves an ``allow`` operation in full precision if its casts cost more than it gains.
    "graphs": the whole graph is left in full precision if the plan is not predicted to be faster, and its costs are
    known. ``accuracy``: a number is an error budget: "mincut" takes the fastest plan whose predicted error is at most
    that many times the error of accuracy "autocast", whatever the rule-based planner permits.
    """

    options: PipelineOptions
    required: ClassVar[bool] = True

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Fill ``node.meta[MARK]``."""
        if fake_mode_of(gm) is None:
            return
        problem = self.problem(gm)
        gm.meta[LOW_DTYPE] = self.options.dtype
        keys = node_keys(gm)
        gm.meta[UNKEPT] = unmatched_keys(self.options.keep_ops, list(keys.values()))
        made = formulate(problem, self._machine, str(self.options.dtype).removeprefix("torch."))
        for node, choice in self._worth_it(made, self._choices(made)).items():
            node.meta[MARK] = _mark(node, keys[node], choice, problem)
            yield Change(self.name, choice.precision, node.name, choice.reason)
        if self.options.calibration is not None:  # what is low without a record of its range
            low = {node: mark.key for node, mark in marks(gm).items() if mark.precision == LOW}
            nodes, gm.meta[UNCALIBRATED] = unmatched(low, self.options.calibration)
            for node in nodes:
                yield Skip(node.name, "the calibration has no record of it: planned without one")

    def problem(self, gm: GraphModule) -> Problem:
        """Return the planning problem of a graph that contains tensors."""
        mode = fake_mode_of(gm)
        o = self.options
        assert mode is not None, "a graph without tensors has no plan"
        nodes = [node for node in gm.graph.nodes if is_tensor_call(node)]
        classes = {node: left_full(node, classified(node, o.lists, mode)) for node in nodes}
        if not o.emulates:  # whose sums in fp32 have gradients of their own
            classes = {node: trained_in_fp32(node, found) for node, found in classes.items()}
        classes = self._constrained(gm, classes)
        return Problem(gm, classes, aliasing.observe_with_caller(gm, classes), o.lists, o.accuracy, o.keep_outputs)

    def _choices(self, made: Formulation) -> dict[Node, Choice]:
        """Ask the planner; PyTorch's own policy is reproduced by rules, operator by operator."""
        if self.options.planner == "paint" or self.options.lists.unlisted != "opaque":
            return made.painted
        if isinstance(self.options.accuracy, str):
            return mincut(made, self.options.leaves == "true")
        influence = next(filter(None, (one.of(made.problem) for one in self.options.measured)), None)
        plans = ErrorBudget(made.problem, made.machine, made.dtype, influence)
        plan = plans.within(self.options.accuracy)
        made.problem.gm.meta[BUDGET] = plans.budget(self.options.accuracy, plan)
        return choices(plans.made, plan.low)

    @property
    def _machine(self) -> Machine:
        o = self.options
        keeps_weights = o.eager and o.planned_for == "cpu" and o.frozen is not None  # cast and packed once
        found = replace(machine_for(o.lists.device), keeps_weights=keeps_weights)
        return replace(found, graph=0.0) if o.in_step else found  # a part of a larger graph: its call is free

    @property
    def _knows_costs(self) -> bool:
        o = self.options
        measured = o.planned_for == "cpu" or machine_for(o.device) is not class_of(o.device)  # those of GPUs were read
        return measured and not o.portable  # which another machine runs

    def _worth_it(self, made: Formulation, chosen: dict[Node, Choice]) -> dict[Node, Choice]:
        """Return the plan, or an all-full plan if that is predicted to be as fast and the policy permits it.

        Symbolic sizes count as in the call at hand.
        """
        if not self.options.eager:  # a compiler fuses calls
            made = formulate(made.problem, replace(made.machine, graph=0.0, call=0.0), made.dtype)
        problem = made.problem
        found = problem.gm.meta[PREDICTED] = predicted(made, low_of(chosen, made))
        leaves = self.options.leaves == "graphs" and self._knows_costs and self.options.lists.unlisted == "opaque"
        if not leaves or found.is_worth_it:
            return chosen
        problem.gm.meta[LEFT_ALONE] = found
        return left_alone(problem, found, made.dtype)

    def _constrained(self, gm: GraphModule, classes: dict[Node, Classification]) -> dict[Node, Classification]:
        """Apply the rules that override the lists: the user's regions, modules, positions, and constants."""
        ours = self.options.lists.unlisted == "opaque"
        rules = [(self.options.keep_fp32, FULL, "kept by keep_fp32")] if self.options.keep_fp32 else []
        rules += [(m.path, m.precision, m.why or "module rule") for m in self.options.lists.modules]
        kept = self._kept(gm)
        full = dict.fromkeys(read_by_strides(classes), READ_BY_STRIDES)
        if ours:
            full |= dict.fromkeys(returned_probabilities(classes, self.options.keep_outputs), RETURNED)
            full |= dict.fromkeys(carriers_of_positions(gm.graph.nodes, classes), POSITIONS)
        done = dict(classes)
        for node, found in classes.items():
            path = node_info.module_path(node)
            rule = next(((p, why) for regex, p, why in rules if node_info.matches_path(regex, path)), None)
            wish = node.meta.get(WISH)
            if REGION in node.meta:
                done[node] = replace(found, cls=OpClass.OPAQUE, why=node.meta[REGION], listed=True)
            elif wish or rule:
                precision, why = wish or rule  # type: ignore[misc]
                done[node] = _by_wish(found, precision, f"{why} (module {path})")
            elif node in kept:
                done[node] = replace(found, cls=OpClass.DENY, why=kept[node], listed=True)
            elif node in full:
                done[node] = replace(found, cls=OpClass.DENY, why=full[node])
            elif found.cls in (OpClass.FOLLOW, OpClass.NEUTRAL) and _has_large_constant(node, self.options.dtype):
                if not _only_masks(node, classes):
                    done[node] = replace(found, cls=OpClass.DENY, why=f"a constant overflows {self.options.dtype}")
        for node in views_of_weights(gm, done) - kept.keys() if ours else ():
            done[node] = replace(done[node], cls=OpClass.ALLOW, why=OF_A_WEIGHT)
        return done

    def _kept(self, gm: GraphModule) -> dict[Node, str]:
        """Return the operations that stay full by a calibration or by name, with the reasons."""
        if self.options.calibration is None and not self.options.keep_ops:
            return {}
        o = self.options
        return kept_full(node_keys(gm), o.calibration, frozenset(o.keep_ops), o.dtype, o.lists.unlisted == "opaque")


def _has_large_constant(node: Node, dtype: torch.dtype) -> bool:
    """Say whether ``node`` has a constant, captured for fp32, that is outside the range of ``dtype``."""
    if node.target is operator.setitem:  # it returns nothing, and its constant may be an integer
        written, constants = node.args[0], [a for a in node.args[2:] if isinstance(a, (int, float))]
    else:
        written, constants = node, [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    eligible = isinstance(written, Node) and is_eligible(captured(written))
    return eligible and not all(node_info.fits(c, dtype) for c in constants)


def _only_masks(node: Node, classes: Mapping[Node, Classification]) -> bool:
    """Say whether only softmax and attention read ``node``: for them, a mask constant just has to be very negative."""
    readers = [classes.get(user) for user in node.users]
    return bool(readers) and all(r is not None and set(r.names) <= MASKED for r in readers)


def _by_wish(found: Classification, precision: str, why: str) -> Classification:
    """Return ``found`` as changed by a module rule; low precision is possible only where a kernel exists."""
    if precision == FULL:
        return replace(found, cls=OpClass.DENY, why=why)
    if found.cls in (OpClass.DENY, OpClass.FOLLOW, OpClass.FP32_INSIDE, OpClass.PROMOTE) and found.listed:
        return replace(found, cls=OpClass.ALLOW, why=why)
    return found


def _mark(node: Node, key: str, choice: Choice, problem: Problem) -> Mark:
    found = problem.classes[node]
    return Mark(
        choice.precision,
        choice.reason,
        _wants(node, found, choice),
        choice.converts_result,
        choice.asks_dtype,
        key=key,
        cls=found.cls,
        origin=found.origin,
        ops=found.names,
        listed=found.listed or (choice.precision == AS_CAPTURED and not choice.wants),
        written=found.written,
    )


def _wants(node: Node, found: Classification, choice: Choice) -> dict[Node, str]:
    """Return the precision of each input that must have a certain one: what is chosen, and a norm's parameters.

    Its kernels reject low parameters with a full input, and some of them full ones with a low input. Fake tensors do
    not report this.
    """
    if not found.partial or found.cls is OpClass.NEUTRAL:
        return dict(choice.wants)
    others = [n for n in node.all_input_nodes if n not in found.applies and n not in found.written]
    others = [n for n in others if is_eligible(captured(n))]
    if found.one_dtype and choice.precision == LOW:
        return {**choice.wants, **dict.fromkeys(others, LOW)}
    return {**dict.fromkeys(others, FULL), **choice.wants}


def refuse_mixed(node: Node) -> None:
    """Raise TypeError if an ``allow`` operation has float operands of two dtypes, but for those that stay full.

    Its kernels need one dtype; fake tensors do not always check it (``linear`` and ``mm`` in torch 2.13).
    """
    mark: Mark | None = node.meta.get(MARK)
    if mark is None or mark.cls is not OpClass.ALLOW:
        return
    operands = [
        s for s in node.all_input_nodes if mark.wants.get(s.all_input_nodes[0] if CAST in s.meta else s) != FULL
    ]
    given = [t for s in operands for t in tensors(value(s)) if t.is_floating_point() and t.dim() > 0]
    found = sorted({str(t.dtype) for t in given})
    if len(found) > 1:
        raise TypeError(f"{', '.join(mark.ops)} takes operands of one dtype, not of {' and '.join(found)}")


def marks(gm: GraphModule) -> dict[Node, Mark]:
    """Return the marks of a planned graph, in node order; none before ``PlanPrecision`` ran."""
    return {n: n.meta[MARK] for n in gm.graph.nodes if MARK in n.meta}
