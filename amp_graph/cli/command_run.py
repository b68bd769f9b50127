"""``amp-graph run``: check the command line, then run the script."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from functools import partial

from amp_graph.errors import AmpGraphError
from amp_graph.run.options import RunOptions, check_compiler
from amp_graph.run.script import module_target, script_target
from amp_graph.run.script import run as run_target

USAGE = "run: a SCRIPT or -m MODULE is needed\n  legal: one of them\n  fix:   amp-graph run --policy bf16 train.py"


def run(args: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the script or module, which does not return if that raises."""
    name, *words = words_of(args) or [""]
    if not name:
        raise AmpGraphError(USAGE)
    options = RunOptions.checked(**{one.name: getattr(args, one.name) for one in fields(RunOptions)})
    check_compiler(args.compile)
    return partial(
        run_target, script_target(name) if args.module_words is None else module_target(name), words, options
    )


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the script or module, and its own words."""
    words: list[str] = args.words if args.module_words is None else args.module_words
    return words[1:] if words[:1] == ["--"] else words
