"""What ``amp_graph.audit`` costs: a looked-at step, another step, a whole run, and the peak of memory.

    python benchmarks/audit.py [--rounds 10] [--scale 0.25] [--models gpt,resnet50,lstm] > audit.md
    python benchmarks/audit.py --runs 3 --steps 300 --scale 0.25 --models gpt,resnet50 > audit_runs.md

Steps of one model under bf16 autocast with AdamW, in turn in one process: without an audit, and in one that looks at
the step. With ``--runs``, whole runs in turn: without an audit, and in one that looks at each 100th step, its beginning
and its end included. Times are those of the process.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import root_on_path  # noqa: F401
import torch
from devices import Device
from host_models import linear
from interleaved import WARM_UP, parser_of
from model_case import Case
from models import case
from result_file import machine
from tables import about

import amp_graph

EVERY = 100
HEARD, LOOKED_AT = {"looks": ()}, {"every": 1}
STEPS = 200  # of a model of no size at once
HEAD = f"""Time of the process and peak of memory, over those of the same step without an audit; of the fastest step of
each, as other processes share the cores. bf16 autocast, AdamW. A run looks at one step of {EVERY}. In others it hears
the calls of torch's functions for mixed precision, which takes as long in every model: measured on a model of no size.
Written by `benchmarks/audit.py`."""
RUNS = f"""Process time of a whole run over that of the same run without an audit: of the fastest of each, and the
range over neighbours. bf16 autocast, AdamW. The audit looks at the 2nd, the 3rd and each {EVERY}th step; its report is
made once, after the run. Written by `benchmarks/audit.py --runs`. The limit is 1.05."""
LIMITS = "The limits are 5 for a looked-at step, 1.05 for a run, 1.3 for the peak."


def step_of(made: Case) -> Callable[[], None]:
    """Return a call of one step of a model."""
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = made.loss(made.model, *made.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def hearing(rounds: int) -> float:
    """Return the seconds by which a step that is only heard takes longer."""
    step = step_of(linear(4))
    found = [(seconds_of(step, HEARD, STEPS), seconds_of(step, None, STEPS)) for _ in range(rounds + WARM_UP)]
    return statistics.median(heard - plain for heard, plain in found[WARM_UP:]) / STEPS


def seconds_of(step: Callable[[], None], options: dict[str, Any] | None, steps: int = 1) -> float:
    """Return the process's seconds of ``steps``; an audit begins and ends outside of the time."""
    with contextlib.nullcontext() if options is None else amp_graph.audit(**options):
        start = time.process_time()
        for _ in range(steps):
            step()
        return time.process_time() - start


def peak_of(step: Callable[[], None], options: dict[str, Any] | None) -> int:
    """Return the most bytes that a step holds beyond what is held before it; the profiler's first step sees more."""
    Device().peak(step)
    with contextlib.nullcontext() if options is None else amp_graph.audit(**options):
        return Device().peak(step)


def row_of(name: str, scale: float, rounds: int, heard: float) -> tuple[str, ...]:
    """Measure one model; ``heard``: the seconds that hearing adds to a step."""
    torch.manual_seed(0)
    step = step_of(case(name, scale))
    found = [(seconds_of(step, None), seconds_of(step, LOOKED_AT)) for _ in range(rounds + WARM_UP)]
    plain, looked = (min(seconds) for seconds in zip(*found[WARM_UP:], strict=True))
    run = 1 + ((EVERY - 1) * heard + looked - plain) / (EVERY * plain)
    memory = peak_of(step, LOOKED_AT) / peak_of(step, None)
    return name, f"{plain * 1e3:.1f}", f"{looked / plain:.2f}", f"{run:.3f}", f"{memory:.2f}"


def run_row_of(name: str, scale: float, runs: int, steps: int) -> tuple[str, ...]:
    """Measure whole runs of one model, without an audit and with one in turn; and the report of one."""
    torch.manual_seed(0)
    step = step_of(case(name, scale))
    seconds_of(step, LOOKED_AT, WARM_UP)
    found = []
    for _ in range(runs):
        plain = seconds_of(step, None, steps)
        start = time.process_time()
        with amp_graph.audit(every=EVERY) as audit:
            for _ in range(steps):
                step()
        found.append((plain, time.process_time() - start))
    start = time.process_time()
    audit.report().text()
    report = time.process_time() - start
    plain, audited = (min(seconds) for seconds in zip(*found, strict=True))
    ratios = [audited / plain for plain, audited in found]
    return (
        name, f"{plain / steps * 1e3:.1f}", f"{plain:.1f}", f"{audited / plain:.3f}",
        f"{min(ratios):.3f}-{max(ratios):.3f}", f"{report:.1f}",
    )  # fmt: skip


def print_runs(options: Any) -> None:
    """Measure whole runs, and print their table."""
    print(f"# What an audit costs of a run\n\n{about(machine('cpu'))}\n\n{RUNS}\n")
    print(f"{options.runs} runs of {options.steps} steps, {options.threads} thread, models at scale {options.scale}.\n")
    print("| model | step, ms | run, s | audited | of neighbours | report, s |\n|---|---:|---:|---:|---:|---:|")
    for name in options.models.split(","):
        print(f"| {' | '.join(run_row_of(name, options.scale, options.runs, options.steps))} |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__, rounds=10)
    parser.add_argument("--runs", type=int, default=0, help="measure as many whole runs of each model instead")
    parser.add_argument("--steps", type=int, default=300, help="of a run")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--models", default="gpt,resnet50,lstm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.runs:
        print_runs(options)
        return
    print(f"# What an audit costs\n\n{about(machine('cpu'))}\n\n{HEAD}\n{LIMITS}\n")
    print(f"{options.rounds} rounds, {options.threads} thread, models at scale {options.scale}.\n")
    heard = hearing(options.rounds)
    print(f"A step that is only heard takes {heard * 1e6:.0f} us more.\n")
    print("| model | step, ms | looked-at step | run, every 100 | peak |\n|---|---:|---:|---:|---:|")
    for name in options.models.split(","):
        print(f"| {' | '.join(row_of(name, options.scale, options.rounds, heard))} |", flush=True)


if __name__ == "__main__":
    main()
