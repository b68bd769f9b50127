"""Runs the script with all that sees its models, and reports when it ends.

``run(target, arguments, options)`` does not return if the script raises or exits: the process ends as the script's.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

from amp_graph.lists.errors import TAKERS, Attempt
from amp_graph.run.eligibility import needs_scale
from amp_graph.run.exit_report import is_first_rank, report_json, report_lines
from amp_graph.run.module_calls import hear
from amp_graph.run.options import RunOptions
from amp_graph.run.script import Target, execute, raise_as_python_does
from amp_graph.run.step_times import StepTimes
from amp_graph.run.trained_models import TrainedModels
from amp_graph.run.worker_processes import Workers


def run(target: Target, arguments: list[str], options: RunOptions) -> int:
    """Run ``target`` with ``arguments``, converting what it trains; return 0 if it ends without an exception."""
    notes: Counter[str] = Counter()
    TAKERS.append(lambda text: notes.update([text]))
    models = TrainedModels(options, StepTimes(options.measure), lambda text: notes.update([text]))
    workers, process = Workers(), os.getpid()
    hear(models)
    if needs_scale(options.policy):
        models.scaling.start()
    failure: BaseException | None = None
    try:
        execute(target, arguments)
    except BaseException as error:
        failure = error
    if os.getpid() == process:
        models.stop()
        _report(models, workers, notes)
    if failure is not None:
        raise_as_python_does(failure)
    return 0


def _report(models: TrainedModels, workers: Workers, notes: Counter[str]) -> None:
    """Print what was converted; nothing here may change how the script ended."""
    if not is_first_rank():
        return
    with Attempt() as tried:
        if models.options.json:
            text = report_json(models, workers, notes)
        else:
            text = "amp-graph run: " + "\n".join(report_lines(models, workers, notes))
    if (error := tried.error) is not None:
        text = f"amp-graph run: the exit report failed: {type(error).__name__}: {error}"
    try:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # closed by the script
        return
