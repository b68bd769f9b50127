"""``amp-graph run``: check the command line, then run the script; errors before it starts have exit status 2."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from amp_graph.run.options import RunError, RunOptions, check_compiler
from amp_graph.run.script import module_target, script_target
from amp_graph.run.script import run as run_target

USAGE = "run: a SCRIPT or -m MODULE is needed\n  legal: one of them\n  fix:   amp-graph run --policy bf16 train.py"


def run(args: argparse.Namespace) -> int:
    """Run the script or module; does not return if it raises."""
    name, *words = words_of(args) or [""]
    try:
        if not name:
            raise RunError(USAGE)
        options = RunOptions.checked(**{one.name: getattr(args, one.name) for one in fields(RunOptions)})
        check_compiler(args.compile)
        target = script_target(name) if args.module_words is None else module_target(name)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return run_target(target, words, options)


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the script or module, and its own words."""
    words: list[str] = args.words if args.module_words is None else args.module_words
    return words[1:] if words[:1] == ["--"] else words
