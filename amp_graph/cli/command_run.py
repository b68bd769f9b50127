"""``amp-graph run``: check the command line, then run the script; errors before it starts have exit status 2."""

from __future__ import annotations

import argparse
import sys

from amp_graph.run.options import RunError, RunOptions, check_compiler
from amp_graph.run.running import run
from amp_graph.run.script import module_target, script_target


def main(args: argparse.Namespace, words: list[str]) -> int:
    """Run the script or module; does not return if it raises."""
    try:
        options = RunOptions.checked(
            args.policy, args.compile, args.only, args.dry_run, args.report, args.measure, args.replace_autocast
        )
        check_compiler(args.compile)
        target = module_target(args.module) if args.module is not None else script_target(words.pop(0))
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return run(target, words, options)
