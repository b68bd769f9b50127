"""Host time of a call and its backward on models of no size, over that of ``torch.autocast``.

    python benchmarks/host_time.py [--rounds 30] [--models linear_4,bert_16] [--modes training,inference]

Python and dispatch are nearly all that such a call takes, and as much of it is spent where a GPU waits for the host.
``convert(model, "bf16")`` runs eagerly, with the default words; the baselines are ``torch.autocast`` and plain fp32.
One thread and one process; the variants take turns, and a ratio is the median over rounds, with quartiles: below 1 is
less than autocast takes.

Training is timed from the call to the end of ``backward()``. ``zero_grad(set_to_none=True)`` and the update by SGD lie
between two steps and outside of the time, so that each call meets weights that were just written. Inference is a call
in evaluation mode under ``no_grad``. Both clocks that may be asked (``--wall``) give about the same where no other
process shares the core.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from host_models import MODELS
from interleaved import interleaved, parser_of, quartiles
from model_case import Case
from result_file import machine as this_machine
from result_file import opened, run_of, written
from tables import about
from torch import nn

import amp_graph
from amp_graph.passes.native.output_file import write_atomically

RESULTS = Path(__file__).parent / "results" / "host_time.json"
LEAST = 0.02  # seconds of a round and variant
AUTOCAST, OURS = "autocast", "amp_graph"
Region = Callable[[], AbstractContextManager[object]]
VARIANTS: dict[str, tuple[Callable[[nn.Module], nn.Module], Region]] = {
    "fp32": (lambda model: model, nullcontext),
    AUTOCAST: (lambda model: model, lambda: torch.autocast("cpu", torch.bfloat16)),
    OURS: (lambda model: amp_graph.convert(model, "bf16"), nullcontext),
}


class Stopwatch:
    """Adds up the time of what is timed, which leaves the optimizer's updates out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.total = clock, 0.0

    def timed(self, call: Callable[[], None], after: Callable[[], None]) -> None:
        """Run ``call``, which counts, then ``after``, which does not."""
        start = self.clock()
        call()
        self.total += self.clock() - start
        after()


def calls_of(name: str, watch: Stopwatch, training: bool) -> dict[str, Callable[[], None]]:
    """Return a step, or a call, of each variant of a model, with the same weights."""
    calls = {}
    for variant, (prepare, region) in VARIANTS.items():
        torch.manual_seed(0)
        case = MODELS[name]()
        model = prepare(case.model.train(training))
        calls[variant] = _step(case, model, region, watch) if training else _call(case, model, region, watch)
    return calls


def _step(case: Case, model: nn.Module, region: Region, watch: Stopwatch) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def forward_and_backward() -> None:
        with region():
            loss = case.loss(model, *case.batch)
        loss.backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return partial(watch.timed, forward_and_backward, update)


def _call(case: Case, model: nn.Module, region: Region, watch: Stopwatch) -> Callable[[], None]:
    def infer() -> None:
        with torch.no_grad(), region():
            case.infer(model, *case.batch)

    return partial(watch.timed, infer, lambda: None)


def measured(name: str, training: bool, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return microseconds of each variant, and its time over autocast's, round by round."""
    watch = Stopwatch(clock)
    seconds = interleaved(calls_of(name, watch, training), rounds, lambda: watch.total, LEAST)
    rows = {}
    for variant, times in seconds.items():
        low, middle, high = quartiles(times, seconds[AUTOCAST])
        over = {"ratio": middle, "p25": low, "p75": high}
        rows[variant] = {"us": statistics.median(times) * 1e6, "over_autocast": over}
    return {"variants": rows}


def markdown(held: dict[str, Any]) -> str:
    """Return all figures of a file of results as Markdown."""
    lines = ["# Host time on models of no size", "", about(held["machine"]), "", _about_steps()]
    for run in held["runs"]:
        for mode, results in run["results"].items():
            lines += ["", f"## {mode.capitalize()}, {_options(run['options'])}", ""]
            lines += ["| model | fp32 us | autocast us | amp_graph us | over autocast [quartiles] |"]
            lines += ["|---|---:|---:|---:|---:|"]
            lines += [_row(name, entry["variants"]) for name, entry in results.items()]
    return "\n".join(lines) + "\n"


def _about_steps() -> str:
    return (
        "Microseconds of a call and its backward (training; the update is outside of the time), or of a call\n"
        "(inference). Written by `benchmarks/host_time.py`, which says more."
    )


def _options(options: dict[str, Any]) -> str:
    return f"{options['clock']} time, {options['threads']} thread, {options['rounds']} rounds"


def _row(name: str, rows: dict[str, Any]) -> str:
    times = " | ".join(f"{rows[variant]['us']:,.0f}" for variant in VARIANTS)
    over = rows[OURS]["over_autocast"]
    return f"| {name} | {times} | {over['ratio']:.2f} [{over['p25']:.2f} - {over['p75']:.2f}] |"


def main() -> None:
    """Measure, print a row as soon as it is there, and write the file of results and its page."""
    parser = parser_of(__doc__, rounds=30)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default="training,inference")
    parser.add_argument("--wall", action="store_true", help="by the wall's clock instead of the process's time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held = opened(options.output, this_machine("cpu"))
    clock = time.perf_counter if options.wall else time.process_time
    words = {"threads": options.threads, "rounds": options.rounds, "clock": "wall" if options.wall else "process"}
    run = run_of(held, words)
    for mode in options.modes.split(","):
        for name in options.models.split(","):
            entry = measured(name, mode == "training", options.rounds, clock)
            print(mode, _row(name, entry["variants"]), flush=True)
            written(options.output, held, run, mode, name, entry)
            write_atomically(options.output.with_suffix(".md"), markdown(held))


if __name__ == "__main__":
    main()
