"""Finds the fastest policy whose measured error stays within a budget, on the machine at hand.

Before: a model, and a step on one batch. After: ``search(model, step, budget=1.0).policy``, such as
``"bf16,accuracy=1.5"``, with a table of all that was measured. A search that is killed goes on from its file.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from amp_graph.convert import refuse_converted, refuse_what_cannot_be_converted, refuse_what_is_no_model
from amp_graph.devices import device_of_model, machine_name
from amp_graph.errors import AmpGraphError, PolicyError
from amp_graph.lists.errors import shortened
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.policy import Policy
from amp_graph.search.bench import Bench, refuse_unusable_steps
from amp_graph.search.proposals import Space, propose
from amp_graph.search.result import SearchResult, shown
from amp_graph.search.space import Step, space_of
from amp_graph.search.trials import AUTOCAST, FULL, NOT_FINITE, Goal, Trial, best_of, put

MOST = 25
HELD_OUT = 1.1  # by which the error on held-out data may exceed the goal: it is another draw


@dataclass(frozen=True)
class Limits:
    """Where a search ends: after ``runs`` measured policies or ``seconds``; ``memory``: bytes of a step, on CUDA.

    ``without``: words of the policy that are not tried, such as "level".
    """

    runs: int = MOST
    seconds: float = math.inf
    memory: float = math.inf
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise PolicyError for limits within which nothing can be measured."""
        if not (self.runs >= 1 and self.seconds >= 0):
            raise PolicyError(
                f"search: {self.runs} runs and {self.seconds:g} seconds are no limits\n"
                "  legal: at least one run, and seconds from 0\n  fix:   runs=25"
            )


def search(
    model: torch.nn.Module,
    step: Step,
    *,
    budget: float | None = None,
    absolute: float | None = None,
    metric: Callable[[torch.nn.Module], float] | None = None,
    held_out: Step | None = None,
    policy: Policy | str = "bf16",
    limits: Limits = Limits(),
    state: str | os.PathLike[str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the fastest policy that was measured, of those that are exact enough.

    model: as it was written; it is copied, and not changed. step: called with a copy; returns the loss of one batch,
    the same one in each call, which begins with the same random state; for inference the outputs, without gradients,
    and models are measured frozen. budget: the largest error, as a multiple of that of ``torch.autocast`` (1.0): the
    relative L2 error of outputs or, if larger, of gradients, against fp32. absolute: that error itself, instead of a
    multiple. metric: instead of both, called as ``metric(model)``; a number of which less is better, at most
    ``budget``. held_out: a step on another batch, on which the answer must be as exact within a tenth; a multiple of
    autocast's error is one of that there. policy: what the search begins with; its words stay, but for the dtype where
    this machine is faster in the other one. In fp16 it keeps in fp32 what overflows. limits: where it ends, such as
    ``amp_graph.Limits(runs=8)``. state: a file that holds what was measured; a search with the same one goes on, and
    proposes what it would have. tell: gets a line for each policy that was measured.

    fp32 is a legal answer, ``"bf16-O0"``; ``result.verdict()`` says why. KeyboardInterrupt ends a search with the best
    policy so far. Raises AmpGraphError (a step that is not repeatable, a metric that is NaN in fp32, a file of another
    search, an error of each policy but fp32), PolicyError, CaptureError.
    """
    asked, goal = _checked(model, budget, absolute, metric, policy)
    budget = 1.0 if budget is None else budget
    device = device_of_model(model) or "cpu"
    machine = machine_name(device)
    bench = Bench(model, step, metric)
    refuse_unusable_steps(bench)
    key: dict[str, Any] = {
        "model": type(model).__name__,
        "policy": str(asked),
        "budget": [budget, absolute],
        "metric": f"{bench.metric_of_full:.4g}",  # which another metric has not
        "machine": f"{machine_for(device).name}, {machine}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    key |= bench.key()
    before, trials = _read(state, key)
    if before is None:
        space = space_of(model, bench.sample, asked, trains=bench.trains)
        before = _Before(bench.trial(AUTOCAST, "torch's own mixed precision"), bench.noise, space)
    unit, noise = before.autocast.error, before.noise
    space = replace(before.space, words=[one for one in before.space.words if one[0] not in limits.without])
    is_relative = metric is None and absolute is None
    if is_relative:
        goal = replace(goal, error=budget * (unit if math.isfinite(unit) else math.nan))
        if math.isnan(goal.error):
            raise AmpGraphError(
                "search: torch.autocast fails on this step, so that its error is no budget: "
                f"{before.autocast.failure}\n  legal: an absolute error\n  fix:   search(model, step, absolute=0.01)"
            )
    goal = replace(goal, memory=limits.memory)
    ended, began = "", time.monotonic()
    try:
        while not ended:
            proposal = propose(space, trials, goal, noise, unit if math.isfinite(unit) else 1.0)
            if proposal is None:
                ended = "nothing is predicted to gain more than the noise"
            elif (runs := sum(one.runs for one in trials)) >= limits.runs or time.monotonic() - began > limits.seconds:
                spent = f"{limits.runs} runs" if runs >= limits.runs else f"{limits.seconds:g} seconds"
                ended = f"its limit of {spent}"
            else:
                last = _measure(bench, trials, *proposal, best_of(trials, goal, noise) if trials else None)
                if state is not None:
                    told = {"search": key, "before": asdict(before), "trials": [asdict(one) for one in trials]}
                    text = json.dumps(told, indent=1) + "\n"
                    write_or_refuse(state, text, "search", "search(..., state='search.json')")
                if tell is not None:
                    tell(
                        f"{runs + 1}: {shown(last.policy)}{' again' * (last.runs > 1)}: {1 / last.time:.2f} times "
                        f"fp32's speed, error {last.error:.2g}; "
                        f"best so far {shown(best_of(trials, goal, noise).policy)}"
                    )
    except KeyboardInterrupt:
        ended = "interrupted; the best so far"
    if not trials:
        trials.append(Trial(FULL, 1.0, 0.0, why="nothing was measured"))
    failures = [one.failure for one in trials[1:]]
    if all(failures) and (reason := next((one for one in failures if one != NOT_FINITE), "")):
        raise AmpGraphError(
            f"search: each policy that was tried fails, but for fp32: {reason}\n"
            f"  legal: a step that can be called with converted copies of the model\n"
            f"  fix:   loss = step(amp_graph.convert(copy.deepcopy(model), {trials[1].policy!r})) shows where"
        )
    answer, error = _confirmed(bench, trials, goal, noise, held_out, budget if is_relative else 0.0)
    policy = answer if answer == FULL else str(replace(Policy.parse(answer), measured_on=machine))
    return SearchResult(
        policy, tuple(trials), goal, before.autocast, noise, error, machine, ended, freeze=not bench.trains
    )


def _checked(model: Any, budget: Any, absolute: Any, metric: Any, policy: Policy | str) -> tuple[Policy, Goal]:
    refuse_what_is_no_model("search", model)
    refuse_converted("search", model)
    for name, one in (("budget", budget), ("absolute", absolute)):
        if one is not None and (isinstance(one, bool) or not isinstance(one, (int, float)) or not one >= 0):
            raise PolicyError(
                f"search: {name}={shortened(one)} is no budget\n  legal: a number from 0\n  fix:   {name}=1.0"
            )
    if metric is not None and absolute is not None:
        raise PolicyError(
            "search: metric with absolute, which bounds the error instead\n  legal: one of them\n"
            "  fix:   search(model, step, metric=metric, budget=0.05)"
        )
    if (metric is not None and budget is None) or (absolute is not None and budget is not None):
        what, fix = (
            ("metric without budget, its largest value", "metric=metric, budget=0.05")
            if metric is not None
            else ("absolute with budget, a multiple", "absolute=0.01")
        )
        raise PolicyError(
            f"search: {what}\n  legal: budget, a multiple of torch.autocast's error; absolute; or metric with budget\n"
            f"  fix:   search(model, step, {fix})"
        )
    asked = replace(Policy.parse(policy), measured_on="")
    refuse_what_cannot_be_converted(model, asked)
    error = math.inf if absolute is None else absolute
    return asked, Goal(error) if metric is None else Goal(metric=budget)


def _hearing(measure: Callable[[], Trial]) -> Trial:
    """Return what is measured; KeyboardInterrupt also where torch dropped it: its guards call Python from C++."""
    pressed: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    is_ours = threading.current_thread() is threading.main_thread()  # only it may set a handler
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return measure()
    before = signal.signal(signal.SIGINT, hear)
    try:
        found = measure()
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
    return found


def _measure(bench: Bench, trials: list[Trial], policy: str, why: str, best: Trial | None) -> Trial:
    """Measure ``policy`` beside the best one, and put it into ``trials``."""
    beside = None if best is None or best.policy == policy else best  # the best one again: beside fp32
    measured = partial(bench.trial, policy, why, beside, again=any(one.policy == policy for one in trials))
    return put(trials, _hearing(measured))


def _confirmed(
    bench: Bench, trials: list[Trial], goal: Goal, noise: float, held_out: Step | None, budget: float
) -> tuple[str, float]:
    """Return the fastest policy that is exact enough on held-out data too, with its error there.

    ``budget``: the multiple of torch.autocast's error, which is another there, as that of a router's model is; or 0.
    """
    if held_out is None or math.isinf(goal.error):
        return best_of(trials, goal, noise).policy, math.nan
    reference = bench.values(bench.plain, held_out)

    def error_of(policy: str) -> float:
        return bench.error(bench.converted(policy), held_out, reference)

    left, most = list(trials), budget * error_of(AUTOCAST) if budget else goal.error
    while (one := best_of(left, goal, noise)).policy != FULL:
        left.remove(one)
        error = error_of(one.policy)
        if error <= most * HELD_OUT:
            return one.policy, error
    return FULL, 0.0


@dataclass(frozen=True)
class _Before:
    """What is measured before the first trial: torch.autocast, the noise of times, and what may be tried."""

    autocast: Trial
    noise: float
    space: Space


def _read(path: Any, key: dict[str, Any]) -> tuple[_Before | None, list[Trial]]:
    """Return what a file holds: a search that goes on proposes what it would have."""
    if path is None or not Path(path).exists():
        return None, []
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        old = found["search"]
        differ = [f"{name}: {old.get(name)} there, {one} here" for name, one in key.items() if old.get(name) != one]
        if not differ:
            told = found["before"]
            space = Space(**{**told["space"], "plans": [Trial(**one) for one in told["space"]["plans"]]})
            before = _Before(Trial(**told["autocast"]), float(told["noise"]), space)
            return before, [Trial(**one) for one in found["trials"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AmpGraphError(
            f"search: {path} holds no search: {type(error).__name__}: {error}\n"
            "  legal: a file that search(state=...) wrote\n  fix:   another file, or delete this one"
        ) from error
    raise AmpGraphError(
        f"search: {path} holds another search: {'; '.join(differ)}\n"
        "  legal: the same model, weights, batch, loss, policy, budget, machine and torch\n"
        "  fix:   another file, or delete this one; torch.manual_seed(0) before a model or batch is drawn"
    )
