"""``amp-graph audit``: run a script, or call a model, as it is, look at its precision, and print what was found.

Errors before the script starts have exit status 2; what the script raises, and its exit status, are its own. With
``--fail-on`` the status is 1 for a finding of that level, and 3 where nothing was looked at, which is not clean.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.audit.audit_report import AuditReport
from amp_graph.audit.records import LEVELS
from amp_graph.audit.session import LOOKS, Audit
from amp_graph.cli.command_run import words_of
from amp_graph.cli.target import Target, load_target
from amp_graph.cli.terminal import json_text
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.passes.native.output_file import write_atomically
from amp_graph.run.exit_report import is_first_rank
from amp_graph.run.options import writable
from amp_graph.run.script import StepsAreOver, execute, module_target, run_and_tell, script_target

USAGE = (
    "audit: a SCRIPT, -m MODULE or TARGET is needed\n  legal: one of them\n"
    "  fix:   amp-graph audit train.py, or amp-graph audit model.py:build --input 'x=f32[8,16]'"
)
Files = Mapping[str, Path | None]  # by the name of the option
FOUND, NOT_LOOKED_AT = 1, 3  # exit statuses of --fail-on


def run(args: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the script, module or model, and prints the report."""
    call, looks = _call_of(args)
    if args.steps == 0:
        raise AmpGraphError("audit: --steps 0: no step would run\n  legal: 1 or more\n  fix:   --steps 10")
    files = {"json": writable(args.json, "audit: --json", "audit.json"),
             "report": writable(args.report, "audit: --report", "audit.html")}  # fmt: skip
    audit = Audit(every=args.every, looks=looks, stop_after=args.steps or 0, ignore=args.ignore)
    return partial(_run, audit, call, files, args.fail_on)


def _run(audit: Audit, call: Callable[[], None], files: Files, fail_on: str) -> int:
    """Run ``call`` under ``audit``, and print the report; what the script raises is raised."""

    def audited() -> None:
        with audit, contextlib.suppress(StepsAreOver):
            call()

    return run_and_tell(audited, lambda: _tell(audit, files, fail_on) if is_first_rank() else 0)


def _call_of(args: argparse.Namespace) -> tuple[Callable[[], None], tuple[int, ...]]:
    """Return what is to run, and the steps that are looked at in any case."""
    name, *words = words_of(args) or [""]
    if not name:
        raise AmpGraphError(USAGE)
    if args.module_words is not None:
        return partial(execute, module_target(name, "audit"), words), LOOKS
    if ":" in name and not os.path.exists(name):
        return partial(_call_model, load_target(name, _inputs_in(words))), (1,)
    return partial(execute, script_target(name, "audit"), words), LOOKS


def _inputs_in(words: list[str]) -> list[str]:
    """Return the --input that follow TARGET: words after a script are its own, those after a model are ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--input", action="append", default=[])
    found, others = parser.parse_known_args(words)
    if others:
        raise AmpGraphError(
            f"audit: {' '.join(others)} after TARGET\n  legal: --input SPEC; other options before TARGET\n"
            "  fix:   amp-graph audit --json audit.json model.py:build --input 'x=f32[8,16]'"
        )
    return list(found.input)


def _call_model(target: Target) -> None:
    """Call the model once, and run the backward of the sum of its outputs, if it has gradients."""
    outputs = [t for t in tree_leaves(target.call(target.model)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _tell(audit: Audit, files: Files, fail_on: str) -> int:
    """Print the report and write its files; return the exit status of ``fail_on``. Nothing here ends the script."""
    report: AuditReport | None = None
    text = ""
    with Attempt() as tried:
        report = audit.report()
        text = report.text(whole="" if files["report"] is not None else "--report FILE.html")
        if files["json"] is not None:
            write_atomically(files["json"], json_text(report.to_dict()))
        if files["report"] is not None:
            report.html(files["report"])
    if tried.error is not None:
        text += f"amp-graph audit: the report failed: {tried.reason}\n"
    status = _status(report, fail_on) if fail_on else 0
    if status == NOT_LOOKED_AT:
        text += "amp-graph audit: --fail-on has nothing to judge by, which is exit status 3\n"
    with contextlib.suppress(OSError, ValueError):  # closed by the script
        sys.stdout.flush()
        print(text, file=sys.stderr, end="", flush=True)
    return status


def _status(report: AuditReport | None, fail_on: str) -> int:
    """Return the exit status of ``--fail-on``: a finding says more than that no step was looked at."""
    if report is not None and report.worst and LEVELS.index(report.worst) >= LEVELS.index(fail_on):
        return FOUND
    return 0 if report is not None and report.looked_at else NOT_LOOKED_AT
