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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import amp_graph
from amp_graph.demo import explain, show, underflow
from amp_graph.demo.data import MissingData
from amp_graph.demo.interleaved_training import Result, race
from amp_graph.demo.tasks import NAMES, Task, has_transformers, task
from amp_graph.demo.threads import useful_threads
from amp_graph.demo.variants import Trainee
from amp_graph.errors import AmpGraphError
from amp_graph.passes.native.atomic_files import write_atomically

Results = dict[str, list[Result]]
CHOICES = (*NAMES, underflow.NAME)


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
        "amp-graph demo", description="Train small models in fp32, under torch.autocast and with amp_graph."
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
    console.print(f"amp_graph demo: {machine}")
    tasks = {name: task(name, quick=options.quick, steps=options.steps) for name in names if name in NAMES}
    results = {name: _raced(chosen, options.output, console) for name, chosen in tasks.items()}
    if tasks:
        show.draw(results, {name: chosen.title for name, chosen in tasks.items()}, options.output / "losses.png")
        _notes(console)
    outcomes = _underflow(options, console) if underflow.NAME in names else []
    console.print(
        f"Curves, graphs and reports are in {options.output}/; the demo took {time.monotonic() - began:.0f} s."
    )
    _write_json(results, outcomes, machine, options.output / "results.json")
    write_atomically(options.output / "results.txt", console.export_text())


def _raced(chosen: Task, folder: Path, console: Console) -> Results:
    """Train one model in all variants, print what became of them and save what was run."""
    results, trainees = _run(chosen, console)
    console.print(show.results_table(chosen, results))
    converted = [one for one in trainees if one.graphs]
    console.print(show.excerpt_table(chosen, explain.excerpt(converted[0].graphs)))
    for one in converted:
        _save(one, folder)
    return results


def _underflow(options: argparse.Namespace, console: Console) -> list[underflow.Outcome]:
    """Train the model whose gradients fp16 cannot hold, and show it."""
    phase = underflow.phase(quick=options.quick, steps=options.steps)
    with _progress() as progress:
        bar = progress.add_task(underflow.NAME, total=phase.steps)
        outcomes = underflow.underflow(phase, lambda: progress.advance(bar))
    console.print(show.underflow_table(outcomes))
    console.print(
        "fp16 ends at 2^-24: here all gradients are below, and without a loss scale nothing is learnt.\n"
        "The scale multiplies the loss before backward; the gradients are divided by it in fp32."
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
            "  fix:   amp-graph demo --models cnn,gpt"
        )
    return list(dict.fromkeys(names))


def _run(chosen: Task, console: Console) -> tuple[Results, list[Trainee]]:
    results: Results = {}
    trainees: list[Trainee] = []
    with _progress() as progress:
        for phase in chosen.phases:
            bar = progress.add_task(f"{chosen.name} {phase.dtype}", total=phase.steps)
            ran, results[phase.dtype] = race(chosen, phase, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
            trainees += ran
    return results, trainees


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _save(one: Trainee, folder: Path) -> None:
    """Save what one converted model ran."""
    stem = f"{one.task.name}_{one.variant.name.removeprefix('amp_graph ').replace(' ', '_')}"
    explain.write_graphs(one.graphs, folder / f"{stem}_graph.txt")
    report: Any = getattr(amp_graph, "report", None)
    if callable(report):
        made = report(one.model)
        write_atomically(folder / f"{stem}_report.txt", str(made.text()))
        made.html(folder / f"{stem}_report.html")


def _notes(console: Console) -> None:
    console.print(
        "Every variant starts from the same weights and sees the same batches, one step of each in turn.\n"
        "time: a whole step (forward, backward, update) over torch.autocast's in the same dtype and round;\n"
        "below 1 is faster. casts: executed in one forward and backward. saved: kept for backward, beside\n"
        "parameters. fp16 is slow on CPU, so its race has smaller batches and fewer steps."
    )


def _write_json(results: dict[str, Results], outcomes: list[underflow.Outcome], machine: str, path: Path) -> None:
    plain: dict[str, Any] = {
        name: {kind: [r.to_dict() for r in rows] for kind, rows in found.items()} for name, found in results.items()
    }
    found = {"machine": machine, "models": plain, underflow.NAME: [one.to_dict() for one in outcomes]}
    write_atomically(path, json.dumps(found, indent=1))


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
