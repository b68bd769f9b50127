"""``amp-graph audit``: run a script as it is, look at what precision it uses, and print what was found."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from amp_graph.audit.session import Audit, StepsAreOver
from amp_graph.cli.command_run import words_of
from amp_graph.cli.terminal import json_text
from amp_graph.run.options import RunError
from amp_graph.run.script import execute, module_target, raise_as_python_does, script_target

USAGE = "audit: a SCRIPT or -m MODULE is needed\n  legal: one of them\n  fix:   amp-graph audit train.py"


def run(args: argparse.Namespace) -> int:
    """Run the script or module, and print the report; what the script raises is raised."""
    name, *words = words_of(args) or [""]
    try:
        if not name:
            raise RunError(USAGE)
        target = script_target(name) if args.module_words is None else module_target(name)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    audit = Audit(every=args.every, stop_after=args.steps)
    failure: BaseException | None = None
    try:
        with audit, contextlib.suppress(StepsAreOver):
            execute(target, words)
    except BaseException as error:
        failure = error
    sys.stdout.flush()
    report = audit.report()
    print(report.text(), file=sys.stderr, flush=True)
    if args.json:
        Path(args.json).write_text(json_text(report.to_dict()), "utf-8")
    if failure is not None:
        raise_as_python_does(failure)
    return 0
