"""The demo's command: trains, prints the tables, saves the picture and the graphs.

``main(["--quick", "--models", "cnn"])`` returns 0, or 1 with a message where something is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from amp_graph.errors import AmpGraphError, AmpGraphWarning
from examples.demo import explain, show, underflow
from examples.demo.data import MissingData
from examples.demo.interleaved_training import Result, race
from examples.demo.progress import steps
from examples.demo.tasks import NAMES, Task, has_bf16_arithmetic, has_transformers, task
from examples.demo.threads import useful_threads
from examples.demo.variants import DEFAULT, VARIANTS, Trainee

Results = dict[str, list[Result]]
CHOICES = (underflow.NAME, *NAMES)
WITH_BF16 = "This CPU has bf16 arithmetic: bf16 can be faster than fp32. fp16 cannot; its races show that it learns."
WITHOUT_BF16 = """\
This CPU has no bf16 arithmetic. fp32 is the fastest precision here, and convert(model) without a
policy keeps fp32. The rows of bf16 and fp16 show that the models learn, and not how fast they are
on a GPU. The races have smaller batches, and end earlier, than on other machines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments; return the exit status."""
    options = _parser().parse_args(argv)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(options.threads or useful_threads())
        _demo(options)
    except AmpGraphError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(before)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m examples.demo", description="Train small models in fp32, under torch.autocast and with amp_graph."
    )
    parser.add_argument("--models", help=f"which, separated by commas (default: {','.join(CHOICES)})")
    parser.add_argument("--steps", type=_positive, help="steps of each bf16 race (fp16: a fifth of it)")
    parser.add_argument("--quick", action="store_true", help="tiny models, a few steps: only to see that it works")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the results")
    parser.add_argument(
        "--threads", type=_positive, help="CPU threads (default: as torch chooses, or 1 on a busy machine)"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _demo(options: argparse.Namespace) -> None:
    console = show.console()
    _check_extras()
    names = _chosen(options.models, console)
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {_processor()}"
    console.print(f"amp_graph demo: {machine}\n{WITH_BF16 if has_bf16_arithmetic() else WITHOUT_BF16}\n")
    outcomes = _underflow(options, console) if underflow.NAME in names else []
    tasks = {name: task(name, quick=options.quick, steps=options.steps) for name in names if name in NAMES}
    results = {name: _raced(chosen, options.output, console) for name, chosen in tasks.items()}
    if tasks:
        show.draw(results, {name: chosen.title for name, chosen in tasks.items()}, options.output / "losses.png")
        _notes(console)
    console.print(
        f"Curves, graphs and reports are in {options.output}/; the demo took {time.monotonic() - began:.0f} s."
    )
    _write_json(results, outcomes, machine, options.output / "results.json")
    (options.output / "results.txt").write_text(console.export_text())


def _raced(chosen: Task, folder: Path, console: Console) -> Results:
    """Train one model in all variants, print what became of them and save what was run."""
    results, trainees = _run(chosen)
    console.print(show.results_table(chosen, results))
    for phase in chosen.phases:
        done = results[phase.dtype][0].steps
        if done < phase.steps:
            console.print(f"{phase.dtype}: {done} of {phase.steps} steps, cut after {phase.seconds:.0f} s\n")
    reports = {one.variant.name.removeprefix("amp_graph "): one.report for one in trainees if one.report}
    console.print(show.excerpt_table(chosen, explain.excerpt(reports["bf16"])))
    for name, report in reports.items():
        stem = folder / f"{chosen.name}_{name.replace(' ', '_')}"
        explain.write_graphs(report, stem.with_name(f"{stem.name}_graph.txt"))
        stem.with_name(f"{stem.name}_report.txt").write_text(report.text())
        report.html(stem.with_name(f"{stem.name}_report.html"))
    return results


def _run(chosen: Task) -> tuple[Results, list[Trainee]]:
    results: Results = {}
    trainees: list[Trainee] = []
    for phase in chosen.phases:
        variants = (*VARIANTS[phase.dtype], *([DEFAULT] if phase.dtype == "bf16" else []))
        with steps(f"{chosen.name} {phase.dtype}", phase.steps) as advance, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "amp_graph: .* is not profitable", AmpGraphWarning)
            ran, results[phase.dtype] = race(chosen, phase, advance, variants=variants)
        trainees += ran
    return results, trainees


def _underflow(options: argparse.Namespace, console: Console) -> list[underflow.Outcome]:
    """Train the model whose gradients fp16 cannot hold, and show it."""
    phase = underflow.phase(quick=options.quick, steps=options.steps)
    with steps(underflow.NAME, phase.steps) as advance:
        outcomes = underflow.underflow(phase, advance)
    console.print(show.underflow_table(outcomes))
    console.print(
        "fp16 ends at 2^-24: here all gradients are below, and without a loss scale nothing is learnt.\n"
        "The scale multiplies the loss before backward; the gradients are divided by it in fp32.\n"
    )
    show.draw_underflow(outcomes, options.output / "underflow.png")
    return outcomes


def _check_extras() -> None:
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if importlib.util.find_spec(module) is None:
            raise MissingData(f"demo: {package} is not installed\n  fix:   pip install 'amp-graph[demo]'")


def _chosen(wanted: str | None, console: Console) -> list[str]:
    """Return the models to train; the Hugging Face one only where it is installed, unless asked for."""
    if wanted is None:
        if not has_transformers():
            console.print("hf is left out: transformers is not installed (pip install 'amp-graph[demo]')")
        return [name for name in CHOICES if name != "hf" or has_transformers()]
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name not in CHOICES]
    if unknown or not names:
        raise AmpGraphError(
            f"demo: unknown model {', '.join(unknown) or repr(wanted)}\n  legal: {', '.join(CHOICES)}\n"
            "  fix:   python -m examples.demo --models cnn,gpt"
        )
    return list(dict.fromkeys(names))


def _notes(console: Console) -> None:
    console.print(
        "Every variant starts from the same weights and sees the same batches, one step of each in turn.\n"
        "speed: torch.autocast's time for a step (forward, backward, update) in the same dtype and round,\n"
        "divided by the variant's; above 1 is faster. casts: executed in one forward and backward. saved:\n"
        "kept for backward, beside parameters. 'no policy' is convert(model), which decides from what it\n"
        "predicts for this machine."
    )


def _write_json(results: dict[str, Results], outcomes: list[underflow.Outcome], machine: str, path: Path) -> None:
    plain: dict[str, Any] = {
        name: {kind: [r.to_dict() for r in rows] for kind, rows in found.items()} for name, found in results.items()
    }
    found = {"machine": machine, "models": plain, underflow.NAME: [one.to_dict() for one in outcomes]}
    path.write_text(json.dumps(found, indent=1))


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
