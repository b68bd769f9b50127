"""Finds the fewest operations that must stay in fp32 for a result to be good enough, by halves.

Before: a model that is not exact enough in bf16. After: ``bisect(model, batches, loss_fn, tolerance=0.01)``, a policy
such as ``"bf16-O1,keep_ops=head:linear"``.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.dynamo_backend import lower
from amp_graph.capture.sensitivity_sample import captured_by, in_fp32
from amp_graph.convert import convert
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphWarning, PolicyError
from amp_graph.lists import OpClass
from amp_graph.lists.errors import shortened
from amp_graph.model_state import same_random_numbers, unwritten
from amp_graph.numerics.batches import LossFn, checked, to_measure
from amp_graph.numerics.compare import planned
from amp_graph.numerics.differences import error_metric
from amp_graph.passes.calibration.node_keys import node_keys
from amp_graph.passes.graph.bodies import bodies_of
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.passes.precision.op_cost import picoseconds, work_of
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.precision.planning_problem import LOW
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.policy import Policy
from amp_graph.rewrite import Rewritten, copy_graph, ready_to_plan

Metric = Callable[[torch.nn.Module, Sequence[Any]], float]
ROUNDING = (OpClass.ALLOW, OpClass.FOLLOW, OpClass.FP32_INSIDE, OpClass.PROMOTE)
MOST = 200  # trials


class BisectedPolicy(str):
    """The text of a policy that meets the tolerance; ``convert`` takes it as it is.

    ``kept``: the operations that stay in fp32, found first first. ``error``: what the metric was with this policy.
    ``runs``: how often the metric ran. ``candidates``: how many operations were planned low. ``is_minimal``: False if
    ``max_runs`` ended the search with a set that is sufficient, but larger than needed.
    """

    kept: tuple[str, ...] = ()
    error: float = math.nan
    runs: int = 0
    candidates: int = 0
    is_minimal: bool = True


def bisect(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    tolerance: float,
    metric: Metric | None = None,
    policy: Policy | str | None = None,
    max_runs: int = MOST,
) -> BisectedPolicy:
    """Return the policy that keeps the fewest operations in fp32 for a metric of at most ``tolerance``.

    model, batches, loss_fn: as for ``amp_graph.calibrate``; policy: as for ``convert``.
    metric: called as ``metric(model, batches)`` with a copy of the model, converted or not, which it may train; returns
    a number, of which less is better, such as 1 minus the accuracy after some steps. None: the relative L2 error of all
    outputs or, if larger, of all gradients of parameters, against fp64 (fp32 if the model has no fp64 kernels).

    The candidates are the operations that the plan rounds. Those whose fp32 costs least time are kept first, so that
    the largest savings stay. The metric runs once in fp32, once with the plan as it is, and then by halves: for one bad
    operation of n, log2(n) + 3 times in all, rounded up, of which the last is of the returned policy. If keeping more
    never makes the metric worse, no operation of the set can be left out. After ``max_runs`` runs the best set so far
    is returned.

    Raises PolicyError (a tolerance that is no number, or that fp32 itself misses; a metric that is no function),
    CalibrationError (no batches, or batches of another structure), CaptureError.
    """
    _refuse_arguments(tolerance, metric, max_runs)
    model, asked = to_measure("bisect", model, loss_fn, policy)
    given = [batch for _, batch in checked("bisect", batches)]
    trials = _Trials(model, given, asked, metric or error_metric(model, given, loss_fn, asked), tolerance)
    candidates = trials.in_fp32()
    found = smallest(candidates, trials.meets, max_runs)
    if found is None:
        raise PolicyError(
            f"bisect: with all {len(candidates)} operations of the plan in fp32 the metric is "
            f"{trials.known[frozenset(candidates)]:g}, above the tolerance {tolerance:g}, which fp32 itself meets\n"
            "  legal: a larger tolerance\n"
            "  fix:   a larger tolerance, or policy='bf16-O0'"
        )
    kept, is_minimal = found
    made = BisectedPolicy(trials.policy(kept))
    made.kept, made.runs, made.candidates = kept, trials.runs, len(candidates)
    made.error, made.is_minimal = trials.known[frozenset(kept)], is_minimal
    return made


def _refuse_arguments(tolerance: Any, metric: Any, max_runs: Any) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise PolicyError(
            f"bisect: tolerance={shortened(tolerance)} is no tolerance\n"
            "  legal: a number from 0, the largest metric that is good enough\n"
            "  fix:   amp_graph.bisect(model, batches, loss_fn, tolerance=0.01)"
        )
    if metric is not None and not callable(metric):
        raise PolicyError(
            f"bisect: metric={shortened(metric)} is no function\n  legal: called as metric(model, batches), returns a "
            "number, of which less is better\n  fix:   metric=lambda model, batches: 1.0 - accuracy(model, batches)"
        )
    if type(max_runs) is not int or max_runs < 1:
        raise PolicyError(
            f"bisect: max_runs={shortened(max_runs)}\n  legal: a whole number, 1 or more\n  fix:   max_runs={MOST}"
        )


@dataclass(eq=False)
class _Trials:
    """Runs the metric for sets of operations that stay in fp32, each on a fresh copy of the model."""

    model: torch.nn.Module
    batches: list[Any]
    asked: Policy
    metric: Metric
    tolerance: float
    runs: int = 0
    known: dict[frozenset[str], float] = field(default_factory=dict)

    def policy(self, kept: Sequence[str]) -> str:
        """Return the text of the policy that keeps these operations as well."""
        return str(replace(self.asked, keep_ops=(*self.asked.keep_ops, *kept)))

    def meets(self, kept: tuple[str, ...]) -> bool:
        """Say whether the metric is small enough with these operations in fp32."""
        key = frozenset(kept)
        if key not in self.known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AmpGraphWarning)  # of a trial, which the user never runs
                self.known[key] = self._run(convert(copy.deepcopy(self.model), self.policy(kept)))
        return self.known[key] <= self.tolerance

    def in_fp32(self) -> list[str]:
        """Run the metric in fp32; return the keys of the operations that the plan rounds, least time saved first.

        Raises PolicyError if fp32 itself misses the tolerance, CaptureError if nothing was captured.
        """
        own, saved = copy.deepcopy(self.model), Counter[str]()
        with captured_by(own, self.asked, partial(_take, saved, self.asked, device_of_model(own)), caller="bisect"):
            found = self._run(own)
        if not found <= self.tolerance:
            raise PolicyError(
                f"bisect: fp32 itself misses the tolerance: the metric is {found:g} for the model as it was written, "
                f"and tolerance={self.tolerance:g}\n"
                f"  legal: a tolerance of at least {found:g}, of a metric of which less is better\n"
                f"  fix:   tolerance={found * 2 if math.isfinite(found) else 0.01:.2g}, or another metric"
            )
        return sorted(saved, key=saved.__getitem__)

    def _run(self, model: torch.nn.Module) -> float:
        self.runs += 1
        with same_random_numbers(), unwritten(self.batches):
            found = self.metric(model, self.batches)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            found = found.item()
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise PolicyError(
                f"bisect: the metric returned a {type(found).__name__}\n  legal: a number, of which less is better\n"
                "  fix:   metric=lambda model, batches: 1.0 - accuracy(model, batches)"
            )
        return math.inf if math.isnan(found) else float(found)


# -- candidates ---------------------------------------------------------------------------------------------


def _take(saved: Counter[str], policy: Policy, device: str | None, gm: GraphModule) -> Runner:
    """Plan a copy of a captured graph, and note what each operation saves, in picoseconds; run it as captured."""
    _note(saved, policy, device, copy_graph(gm), planned(gm, policy, device))
    return lower(gm, (), "eager", replace(in_fp32(policy), level="O0"))


def _note(saved: Counter[str], policy: Policy, device: str | None, prepared: GraphModule, plan: Rewritten) -> None:
    """Note what the operations of a captured graph, and of those inside it, save by ``plan``."""
    classes = ready_to_plan(prepared, policy, device).classes
    for body in bodies_of(prepared):
        if body.name in plan.bodies:
            _note(saved, policy, device, body.graph, plan.bodies[body.name])
    machine = machine_for(policy.device or device or "cpu")
    dtype = str(policy.torch_dtype(device or "cpu")).removeprefix("torch.")
    chosen = {node.name: mark for node, mark in marks(plan.gm).items()}
    for node, key in node_keys(prepared).items():
        mark = chosen.get(node.name)
        if mark is not None and mark.precision == LOW and mark.cls in ROUNDING:
            work = work_of(node, classes[node])
            saved[key] += picoseconds(work, machine, "float32") - picoseconds(work, machine, dtype)


# -- the search ---------------------------------------------------------------------------------------------


def smallest(
    candidates: Sequence[str], meets: Callable[[tuple[str, ...]], bool], most: int
) -> tuple[tuple[str, ...], bool] | None:
    """Return a set for which ``meets`` is true, and none of whose members can be left out if more never hurts.

    Each round finds the last candidate without which the ones before it are not sufficient, by halves. The last trial
    is of the set that is returned. All candidates together are taken to be sufficient until a round shows otherwise.
    With it, whether it is minimal: after ``most`` trials a set that is known to be sufficient is returned as it is.
    None: all candidates together are not sufficient. Sources: delta debugging (Zeller and Hildebrandt, 2002), and
    group testing by halves (Hwang, 1972).
    """
    chosen: list[str] = []
    end, trials, is_known = len(candidates), 0, False

    def is_sufficient(count: int) -> bool:
        nonlocal trials
        trials += 1
        return meets((*chosen, *candidates[:count]))

    while not is_sufficient(0):
        if not is_known and (chosen or not candidates):
            is_known = bool(end) and is_sufficient(end)
            if not is_known:
                return None
        low, high = 0, end
        while high - low > 1:
            if trials >= most and is_known:
                return (*chosen, *candidates[:high]), False
            middle = (low + high) // 2
            if is_sufficient(middle):
                high, is_known = middle, True
            else:
                low = middle
        chosen.append(candidates[high - 1])
        end = high - 1
        if not end and is_known:
            break
    return tuple(chosen), True
