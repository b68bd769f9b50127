"""Measure accuracy=1.0 beside torch.autocast: the corpus, ill-conditioned chains, and random programs.

    python -m tests.measure_budgets [--programs 100] [--seconds 500]

A row for each case whose error is more than 1.2 times autocast's: of the outputs together or of the median gradient,
relative to fp64 (corpus, chains) or eager fp32 (random programs). An error below 1e-3, an eighth of a rounding to
bfloat16, counts as none. A random program is tiny, and its error one draw: beyond 1.2 it is drawn five times more, and
the median of all six counts. "predictions": the error of the outputs as predicted, beyond 2 times what is measured, or
below half of it, where the report gives no reason why it is no bound; with six draws, as above, where one is beyond.
"""

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch

import amp_graph
from amp_graph.passes.precision import plan_precision
from tests import random_programs as programs
from tests.corpus import CASES, make
from tests.measure import gradient_errors, output_error, reference, run
from tests.passes.planning import machine
from tests.passes.precision.ill_conditioned import CALLS
from tests.random_chains import calls_behind_chains, errors

POLICY, LIMIT, NONE = "bf16,accuracy=1.0", 1.2, 1e-3
Row = tuple[str, float, float]  # a case, the error under the policy, and under autocast


def of_corpus() -> Iterator[Row]:
    """Yield outputs and median gradients of the corpus."""
    for name in CASES:
        want = reference(name, 0)
        try:
            theirs = run(name, 0, context=lambda: torch.autocast("cpu", torch.bfloat16))
        except RuntimeError:  # it fails on operands of two dtypes: there is no error to compare with
            continue
        ours = run(name, 0, lambda model: amp_graph.convert(model, POLICY))
        yield f"{name}: output", output_error(ours, want), output_error(theirs, want)
        pair = [list(gradient_errors(one, want).values()) for one in (ours, theirs)]
        if all(pair):
            yield f"{name}: gradients", statistics.median(pair[0]), statistics.median(pair[1])


def of_chains() -> Iterator[Row]:
    """Yield each operation where it is ill-conditioned, behind a chain."""
    for seed, name in enumerate(sorted(CALLS)):
        function, inputs, state, steps = calls_behind_chains(seed, [name])
        for key, (ours, theirs) in errors(function, POLICY, inputs, state).items():
            yield f"{name} after {steps[name]}: {key}", ours, theirs


def of_programs(count: int) -> Iterator[Row]:
    """Yield random programs."""
    for seed in random.Random(0).sample(range(100_000), count):
        plan = replace(programs.grow(seed), policy=POLICY)
        rows = _of_program(plan)
        if any(not ratio(*row) <= LIMIT for row in rows.values()):
            drawn = [rows, *(_of_program(replace(plan, data=data)) for data in range(1, 6))]
            rows = {key: sorted((one[key] for one in drawn), key=lambda row: ratio(*row))[3] for key in rows}
        for key, row in rows.items():
            yield f"program {seed}: {key}", *row


def _of_program(plan: programs.Plan) -> dict[str, tuple[float, float]]:
    """Return the errors of one program under the policy and under autocast; none where autocast fails."""
    want = programs.run(plan)
    try:
        cast = programs.run(plan, context=torch.autocast("cpu", torch.bfloat16))
    except RuntimeError:
        return {}
    got = programs.run(plan, lambda model: amp_graph.convert(model, POLICY))
    ours, theirs = (programs._errors(one, want) for one in (got, cast))
    return {key: (ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())}


def ratio(ours: float, theirs: float) -> float:
    """Return an error over another, both at least ``NONE``."""
    return max(ours, NONE) / max(theirs, NONE)


def predicted_and_measured(name: str, multiple: float, seed: int = 0) -> tuple[float, float] | None:
    """Return the error of a corpus case under a budget, in autocast's, as predicted and measured; None: no bound."""
    _, args, kwargs = make(name, seed)
    policy, wanted, kept = f"bf16,accuracy={multiple}", reference(name, seed), []

    def planned(model: torch.nn.Module) -> torch.nn.Module:
        kept.append(amp_graph.convert(model, policy, sample=lambda m: CASES[name].loss(m(*args, **kwargs))))
        return kept[0]

    ours = output_error(run(name, seed, planned), wanted)
    theirs = output_error(run(name, seed, lambda model: amp_graph.convert(model, "bf16,planner=paint")), wanted)
    plans = [graph.budget for graph in amp_graph.report(kept[0]).graphs]
    if len(plans) != 1 or plans[0] is None or plans[0].origin != "measured" or not theirs:
        return None
    return plans[0].error, ours / theirs


def of_predictions() -> Iterator[Row]:
    """Yield what is predicted and what is measured, the larger one first."""
    for name in (n for n, case in CASES.items() if case.tags.isdisjoint(("integer", "random"))):
        for multiple in (1.0, 1.3):
            found = predicted_and_measured(name, multiple)
            if found is not None and not ratio(max(found), min(found)) <= 2:
                others = (predicted_and_measured(name, multiple, seed) for seed in range(1, 6))
                drawn = [found, *filter(None, others)]
                found = statistics.median(p for p, _ in drawn), statistics.median(m for _, m in drawn)
            if found is not None:
                yield f"{name}, predicted {found[0]:.2f}, measured {found[1]:.2f}", max(found), min(found)


def main(arguments: list[str]) -> int:
    """Print what exceeds the limit, and how many cases were measured; return 1 if any does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--only", default="chains,corpus,programs,predictions", help="which of the sets")
    parser.add_argument("--seconds", type=float, default=500.0, help="the time for each set")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    # So that low precision pays for small operations too: else most of these models stay in fp32, and are exact.
    pays = replace(machine("cpu_amx"), call=1e-12)
    plan_precision.machine_for = lambda device: pays
    beyond = 0
    sets = {"chains": of_chains(), "corpus": of_corpus(), "programs": of_programs(asked.programs)}
    sets["predictions"] = of_predictions()
    for name, rows in ((name, sets[name]) for name in asked.only.split(",")):
        start, ratios, limit = time.perf_counter(), [], 2.0 if name == "predictions" else LIMIT
        for case, ours, theirs in rows:
            ratios.append(ratio(ours, theirs))
            if not ratios[-1] <= limit:
                print(f"{case}: {ours:.2e}, autocast {theirs:.2e}", flush=True)
            if time.perf_counter() - start > asked.seconds:
                break
        over = sum(not one <= limit for one in ratios)
        beyond += over
        print(f"{name}: {len(ratios)} errors, median ratio {statistics.median(ratios):.2f}, {over} beyond {limit}")
        torch._dynamo.reset()
    return beyond > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
