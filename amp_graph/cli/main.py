"""The command line: ``amp-graph run | dump | explain | lists | passes | plan | cost | export | locate | ...``.

``main(["dump", "model.py:build", "--input", "x=f32[8,16]"])`` prints, and returns the exit status. Nothing
here imports torch until a command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable

from amp_graph.version import __version__

FORMATS = ("text", "table", "code", "dot", "graphml", "json", "report", "html")
SHELLS = ("bash", "zsh", "tcsh")
STEPS = ("SGD", "Adam", "AdamW", "Adagrad")
EXPORTS = ("pt2", "onnx", "aoti")
FOUND = "Exit status: 0 if loss and gradients are finite, 3 if not, 1 for an error, 2 for an unreadable command line."
BUDGETS = "0.5,0.75,0.9,1,1.1,1.25,1.5,2,3"
TARGET = "package.module:name or path/file.py:name, which is or returns a module, or (module, inputs)"
INPUT = 'an input to make: "x=f32[8,3,224,224],y=i64[8]:0..999"; instead of the inputs that TARGET gives'
POLICY = '"bf16", "fp16-O1,accuracy=fast", "bf16,keep_fp32=lm_head|.*norm"'
RUN = "amp_graph.cli.command_run"
RUN_USAGE = """amp-graph run [OPTIONS] SCRIPT [ARGS...]
       amp-graph run [OPTIONS] -m MODULE [ARGS...]"""
RUN_EPILOG = """\
All words after SCRIPT or MODULE are the script's own. Exit status: the script's; 2 if it was not started.
Environment: AMP_GRAPH_POLICY is the policy without --policy.
With several processes: torchrun --nproc-per-node 2 -m amp_graph run SCRIPT, accelerate launch -m amp_graph run SCRIPT.
"""
EPILOG = "Exit status: 0, 1 for an error, 2 for a command line that cannot be read."


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; errors go to stderr."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version, or a usage error that argparse has printed
        return int(stop.code or 0)
    run: Callable[[argparse.Namespace], int] = importlib.import_module(args.module).run
    if args.module == RUN:  # the script's own errors and exit status are passed on
        return run(args)
    return _guarded(lambda: int(run(args)), args.traceback)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "amp-graph", description="Which operation of a model runs in which precision, and why.", epilog=EPILOG
    )
    made.add_argument("--version", action="version", version=f"amp-graph {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_dump(commands.add_parser("dump", help="print the captured graphs of a model", epilog=EPILOG))
    _add_explain(commands.add_parser("explain", help="print all that is known about one node", epilog=EPILOG))
    _add_lists(commands.add_parser("lists", help="print which class an operation is in, and why", epilog=EPILOG))
    _add_passes(commands.add_parser("passes", help="print all passes in order: which are on, and why others are off"))
    _add_calibrate(
        commands.add_parser("calibrate", help="measure this machine's rates, or a model's ranges", epilog=EPILOG)
    )
    _add_cost(
        commands.add_parser(
            "cost", help="measure whether low precision pays: fp32, torch.autocast and the plan", epilog=EPILOG
        )
    )
    _add_plan(commands.add_parser("plan", help="predict time and error of a plan, and of error budgets", epilog=EPILOG))
    _add_locate(commands.add_parser("locate", help="name the operation that makes an infinity or NaN", epilog=FOUND))
    _add_export(
        commands.add_parser("export", help="write a model in mixed precision for other programs", epilog=EPILOG)
    )
    _add_cache(commands.add_parser("cache", help="list or remove the compiled C kernels", epilog=EPILOG))
    _add_completion(commands.add_parser("completion", help="print a script that completes this command in a shell"))
    _add_run(commands.add_parser(
        "run", help="run a training script and convert what it trains; see amp-graph run --help", usage=RUN_USAGE,
        epilog=RUN_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    ))  # fmt: skip
    return made


def _add_dump(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    add = parser.add_argument
    add("--format", choices=FORMATS, default="text", help="how to print (default: text)")
    add("--before", action="store_true", help="print the graph as captured")
    add("--after", action="store_true", help="print the graph as rewritten (default)")
    add("--diff", action="store_true", help="print the difference of the two")
    add("--reasons", action="store_true", help="append each node's precision and reason")
    add("--step", nargs="?", const="AdamW", choices=STEPS, help="print the whole training step (default: AdamW)")
    add("--skipped", action="store_true", help="with --format report: also what passes left as it was, and why")
    add("--output", metavar="FILE", help="write to FILE instead of stdout")
    add("--report", metavar="FILE", help="also write the HTML report to FILE")
    add("--measure", action="store_true", help="with --report: measure fp32, torch.autocast and the converted model")
    _add_json(parser, format="json")
    parser.set_defaults(module="amp_graph.cli.command_dump")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run an unmodified training script, and convert the models that it trains to mixed precision."
    add = parser.add_argument
    add("words", metavar="SCRIPT", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("-m", dest="module_words", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    add("--policy", metavar="P", help='as in amp_graph.convert: "bf16", "bf16,accuracy=fast"')
    add("--compile", metavar="C", default="eager", help="eager (default), inductor or another Dynamo backend")
    add("--only", metavar="REGEX", help="convert only modules whose class or path in the model matches")
    add("--dry-run", action="store_true", help="run as written, and say what would be converted")
    add("--report", metavar="FILE.html", help="write the HTML report of each converted model")
    add("--measure", action="store_true", help="time the first steps as written, convert then, and time again")
    add("--replace-autocast", action="store_true", help="convert models called under the script's own torch.autocast")
    add("--json", action="store_true", help="what was converted as JSON, in the last line of stderr")
    parser.set_defaults(module=RUN)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument("node", metavar="NODE", help="%%7, a name, a module path or an operation")
    parser.add_argument("--report", metavar="FILE", help="also write the HTML report to FILE, opened at NODE")
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_explain")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_cost")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    told = "print time and error for a list of budgets: predicted, and measured with interleaved training steps"
    parser.add_argument("--sweep", metavar="BUDGETS", nargs="?", const=BUDGETS, help=f"{told} (default: {BUDGETS})")
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_plan")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument(
        "--to", choices=EXPORTS, required=True,
        help="pt2: for torch.export.load; onnx: for onnxruntime and others; aoti: compiled by AOTInductor",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", required=True, help="the file to write")
    parser.add_argument(
        "--fold-weights", action="store_true", help="store weights in low precision where all read them so"
    )
    parser.add_argument("--opset", metavar="N", type=int, help="the version of ONNX (default: torch.onnx's)")
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_export")


def _add_locate(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    add = parser.add_argument
    add("--batch", metavar="FILE", help="a batch that torch.save((inputs, *targets), FILE) wrote")
    add("--loss", metavar="LOSS", help="package.module:name or path/file.py:name, called as loss(outputs, *targets)")
    add("--scale", metavar="S", type=float, help="the loss scale (default: 1)")
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_locate")


def _add_target(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("target", metavar="TARGET", nargs="?" if optional else None, help=TARGET)
    parser.add_argument("--input", metavar="SPEC", action="append", default=[], help=INPUT)
    _add_common(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--train", dest="training", action="store_true", default=None, help="model.train() first")
    mode.add_argument("--eval", dest="training", action="store_false", help="model.eval() first")


def _add_lists(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", nargs="?", help="such as gelu or aten.pow.Tensor_Scalar")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    _add_common(parser)
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_lists")


def _add_passes(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"A pass that is on still decides at each node. {EPILOG}"
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--compile", choices=("eager", "inductor"), default="eager", help="default: eager")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--step", action="store_true", help="of amp_graph.TrainStep (default: of amp_graph.convert)")
    mode.add_argument("--no-grad", dest="gradients", action="store_false", help="of calls without gradients")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print (default: text)")
    _add_common(parser)
    _add_json(parser, format="json")
    parser.set_defaults(module="amp_graph.cli.command_passes")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure this machine's rates; with TARGET, the ranges of that model's values (see --output)."
    _add_target(parser, optional=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default: cpu)")
    parser.add_argument("--output", metavar="FILE", help="default: the planner's file; with TARGET: calibration.json")
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_calibrate")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "clear"), help="list: print them; clear: remove them")
    parser.add_argument("--traceback", action="store_true", help="show all of an error")
    _add_json(parser)
    parser.set_defaults(module="amp_graph.cli.command_cache")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.epilog = 'bash: eval "$(amp-graph completion bash)"'
    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    parser.add_argument("--traceback", action="store_true", help="show all of an error")
    parser.set_defaults(module="amp_graph.cli.command_completion")


def _add_json(parser: argparse.ArgumentParser, **format: str) -> None:
    """Add ``--json``; for a command that has ``--format``, it is the same as ``--format json``."""
    told = "print JSON"
    if format:
        parser.add_argument("--json", dest="format", action="store_const", const="json", help=f"{told}: --format json")
    else:
        parser.add_argument("--json", action="store_true", help=told)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", metavar="P", help=POLICY)
    parser.add_argument("--traceback", action="store_true", help="show all of an error in your code")


# -- errors -------------------------------------------------------------------------------------------


def _guarded(command: Callable[[], int], full: bool) -> int:
    """Run a command; print errors in at most one screen."""
    from amp_graph.errors import AmpGraphError

    try:
        return command()
    except AmpGraphError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output closed it: `amp-graph dump ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the user's own code may raise anything
        print("".join(traceback.format_exception(error)) if full else _short(error), file=sys.stderr)
        return 1


def _short(error: BaseException) -> str:
    """Return an error of the user's code in a few lines: type, message, and the user's last line."""
    words = str(error).strip().splitlines()
    lines = [f"{type(error).__name__}: {words[0] if words else ''}", *(f"  {word}" for word in words[1:12])]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_theirs(f.filename)]
    if frames:  # empty if the code that failed belongs to a package
        last = frames[-1]
        lines.append(f"  at {last.filename}:{last.lineno}, in {last.name}: {last.line}")
    return "\n".join([*lines, "  fix:   --traceback shows the whole traceback"])


def _is_theirs(path: str) -> bool:
    """Return whether a frame is in the user's code: not Python's, a package's, or ours."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    passes = os.path.join(os.path.dirname(os.path.dirname(ours)), "passes") + os.sep
    library = os.path.dirname(os.__file__) + os.sep
    return not path.startswith((ours, passes, library, "<")) and f"{os.sep}site-packages{os.sep}" not in path
