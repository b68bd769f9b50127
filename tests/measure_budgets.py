"""Measure accuracy=1.0 beside torch.autocast: the corpus, ill-conditioned chains, and random programs.

    python -m tests.measure_budgets [--programs 100] [--seconds 500]

A row for each case whose error is more than 1.2 times autocast's: of the outputs together or of the median gradient,
relative to fp64 (corpus, chains) or eager fp32 (random programs). An error below 1e-3, an eighth of a rounding to
bfloat16, counts as none.
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
from tests.corpus import CASES
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
        ours = run(name, 0, lambda model: amp_graph.convert(model, POLICY))
        theirs = run(name, 0, context=lambda: torch.autocast("cpu", torch.bfloat16))
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
        want = programs.run(plan)
        try:
            cast = programs.run(plan, context=torch.autocast("cpu", torch.bfloat16))
        except RuntimeError:
            continue
        got = programs.run(plan, lambda model: amp_graph.convert(model, POLICY))
        ours, theirs = (programs._errors(one, want) for one in (got, cast))
        for key in ours.keys() & theirs.keys():
            yield f"program {seed}: {key}", ours[key], theirs[key]


def main(arguments: list[str]) -> int:
    """Print what exceeds the limit, and how many cases were measured; return 1 if any does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--only", default="chains,corpus,programs", help="which of the three sets")
    parser.add_argument("--seconds", type=float, default=500.0, help="the time for each of the three sets")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    # So that low precision pays for small operations too: else most of these models stay in fp32, and are exact.
    pays = replace(machine("cpu_amx"), call=1e-12)
    plan_precision.machine_for = lambda device: pays
    beyond = 0
    sets = {"chains": of_chains(), "corpus": of_corpus(), "programs": of_programs(asked.programs)}
    for name, rows in ((name, sets[name]) for name in asked.only.split(",")):
        start, ratios = time.perf_counter(), []
        for case, ours, theirs in rows:
            ratios.append(max(ours, NONE) / max(theirs, NONE))
            if not ratios[-1] <= LIMIT:
                print(f"{case}: {ours:.2e}, autocast {theirs:.2e}", flush=True)
            if time.perf_counter() - start > asked.seconds:
                break
        over = sum(not ratio <= LIMIT for ratio in ratios)
        beyond += over
        print(f"{name}: {len(ratios)} errors, median ratio {statistics.median(ratios):.2f}, {over} beyond {LIMIT}")
        torch._dynamo.reset()
    return beyond > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
