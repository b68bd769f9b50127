"""Reads the command line of ``amp-graph run``: its own options come before the script, the script's after it.

Imports no torch: ``amp-graph run --help`` does not wait for it.
"""

from __future__ import annotations

import argparse

VALUED = ("--policy", "--compile", "--only", "--report")
EPILOG = """\
All words after SCRIPT or MODULE are the script's own. Exit status: the script's; 2 if it was not started.
Environment: AMP_GRAPH_POLICY is the policy without --policy.
With several processes: torchrun --nproc-per-node 2 -m amp_graph run SCRIPT, accelerate launch -m amp_graph run SCRIPT.
"""


def read_command(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our options and the words of the script; SystemExit as argparse's for what cannot be read."""
    ours, rest = _split(words)
    parser = run_parser()
    args = parser.parse_args(ours)
    if args.module is None and not rest:
        parser.error("a SCRIPT or -m MODULE is needed")
    return args, rest


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return our words, and the script's: all after ``-m MODULE``, or from the first word that is no option on."""
    at = 0
    while at < len(words):
        word = words[at]
        if word == "-m":
            return words[: at + 2], words[at + 2 :]
        if word == "--":
            return words[:at], words[at + 1 :]
        if not word.startswith("-") or word == "-":
            return words[:at], words[at:]
        at += 2 if word in VALUED else 1
    return words, []


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of our own options."""
    parser = argparse.ArgumentParser(
        "amp-graph run",
        usage="amp-graph run [OPTIONS] SCRIPT [ARGS...]\n       amp-graph run [OPTIONS] -m MODULE [ARGS...]",
        description="Run an unmodified training script, and convert the models that it trains to mixed precision.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    add("--policy", metavar="P", help='as in amp_graph.convert: "bf16", "bf16,accuracy=fast"')
    add("--compile", metavar="C", default="eager", help="eager (default), inductor or another Dynamo backend")
    add("--only", metavar="REGEX", help="convert only modules whose class or path in the model matches")
    add("--dry-run", action="store_true", help="run as written, and say what would be converted")
    add("--report", metavar="FILE.html", help="write the HTML report of each converted model")
    add("--measure", action="store_true", help="time the first steps as written, convert then, and time again")
    add("--replace-autocast", action="store_true", help="convert models called under the script's own torch.autocast")
    parser.set_defaults(command="amp_graph.cli.command_run")
    return parser
