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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_graph.version import __version__

FORMATS = ("text", "table", "code", "dot", "graphml", "json", "report", "html")
SHELLS = ("bash", "zsh", "tcsh")
STEPS = ("SGD", "Adam", "AdamW", "Adagrad")
EXPORTS = ("pt2", "onnx", "aoti")
FOUND = "Exit status: 0 if loss and gradients are finite, 3 if not, 1 for an error, 2 for an unreadable command line."
BUDGETS = "0.5,0.75,0.9,1,1.1,1.25,1.5,2,3"
A_TARGET = "package.module:name or path/file.py:name, which is or returns a module, or (module, inputs)"
INPUT = 'an input to make: "x=f32[8,3,224,224],y=i64[8]:0..999"; instead of the inputs that TARGET gives'
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
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, **{"epilog": EPILOG, **command.more})
        own.set_defaults(module=f"amp_graph.cli.command_{command.name}")
        for one in command.options:
            if isinstance(one, Option):
                one.add_to(own)
            else:
                exclusive = own.add_mutually_exclusive_group()
                for alternative in one:
                    alternative.add_to(exclusive)
    return made


class Option:
    """An option or an argument of a command, as ``add_argument`` takes it."""

    def __init__(self, *names: str, help: str, **how: Any) -> None:
        self.names, self.how = names, {"help": help, **how}

    def add_to(self, parser: Any) -> None:
        """Add it to a parser, or to a group of one."""
        parser.add_argument(*self.names, **self.how)


@dataclass(frozen=True)
class Command:
    """A command, which the module ``command_NAME`` runs; options that exclude each other are in a tuple.

    more: what else its parser is told.
    """

    name: str
    help: str
    options: tuple[Option | tuple[Option, ...], ...]
    more: Mapping[str, Any] = field(default_factory=dict)


JSON = Option("--json", action="store_true", help="print JSON")
JSON_FORMAT = Option("--json", dest="format", action="store_const", const="json", help="print JSON: --format json")
TRACEBACK = Option("--traceback", action="store_true", help="show all of an error in your code")
COMMON = (
    Option("--policy", metavar="P", help='"bf16", "fp16-O1,accuracy=fast", "bf16,keep_fp32=lm_head|.*norm"'),
    TRACEBACK,
)
MODEL = (
    Option("--input", metavar="SPEC", action="append", default=[], help=INPUT),
    *COMMON,
    (
        Option("--train", dest="training", action="store_true", default=None, help="model.train() first"),
        Option("--eval", dest="training", action="store_false", help="model.eval() first"),
    ),
)
TARGET = (Option("target", metavar="TARGET", help=A_TARGET), *MODEL)
DEVICE = Option("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
COMMANDS = (
    Command("dump", "print the captured graphs of a model", (
        *TARGET,
        Option("--format", choices=FORMATS, default="text", help="how to print (default: text)"),
        Option("--before", action="store_true", help="print the graph as captured"),
        Option("--after", action="store_true", help="print the graph as rewritten (default)"),
        Option("--diff", action="store_true", help="print the difference of the two"),
        Option("--reasons", action="store_true", help="append each node's precision and reason"),
        Option("--step", nargs="?", const="AdamW", choices=STEPS, help="print a whole training step (default: AdamW)"),
        Option("--skipped", action="store_true",
               help="with --format report: also what passes left as it was, and why"),
        Option("--output", metavar="FILE", help="write to FILE instead of stdout"),
        Option("--report", metavar="FILE", help="also write the HTML report to FILE"),
        Option("--measure", action="store_true",
               help="with --report: measure fp32, torch.autocast and the converted model"),
        JSON_FORMAT,
    )),
    Command("explain", "print all that is known about one node", (
        *TARGET,
        Option("node", metavar="NODE", help="%%7, a name, a module path or an operation"),
        Option("--report", metavar="FILE", help="also write the HTML report to FILE, opened at NODE"),
        JSON,
    )),
    Command("lists", "print which class an operation is in, and why", (
        Option("op", metavar="OP", nargs="?", help="such as gelu or aten.pow.Tensor_Scalar"), DEVICE, *COMMON, JSON,
    )),
    Command("passes", "print all passes in order: which are on, and why others are off", (
        DEVICE,
        Option("--compile", choices=("eager", "inductor"), default="eager", help="default: eager"),
        (
            Option("--step", action="store_true", help="of amp_graph.TrainStep (default: of amp_graph.convert)"),
            Option("--no-grad", dest="gradients", action="store_false", help="of calls without gradients"),
        ),
        Option("--format", choices=("text", "json"), default="text", help="how to print (default: text)"),
        *COMMON, JSON_FORMAT,
    ), {"epilog": f"A pass that is on still decides at each node. {EPILOG}"}),
    Command("calibrate", "measure this machine's rates, or a model's ranges", (
        Option("target", metavar="TARGET", nargs="?", help=A_TARGET), *MODEL,
        Option("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default: cpu)"),
        Option("--output", metavar="FILE", help="default: the planner's file; with TARGET: calibration.json"),
        JSON,
    ), {"description": "Measure this machine's rates; with TARGET, the ranges of that model's values (see --output)."}),
    Command("cost", "measure whether low precision pays: fp32, torch.autocast and the plan", (*TARGET, JSON)),
    Command("plan", "predict time and error of a plan, and of error budgets", (
        *TARGET,
        Option("--sweep", metavar="BUDGETS", nargs="?", const=BUDGETS,
               help="print time and error for a list of budgets: predicted, and measured with interleaved training "
               f"steps (default: {BUDGETS})"),
        JSON,
    )),
    Command("locate", "name the operation that makes an infinity or NaN", (
        *TARGET,
        Option("--batch", metavar="FILE", help="a batch that torch.save((inputs, *targets), FILE) wrote"),
        Option("--loss", metavar="LOSS",
               help="package.module:name or path/file.py:name, called as loss(outputs, *targets)"),
        Option("--scale", metavar="S", type=float, help="the loss scale (default: 1)"),
        JSON,
    ), {"epilog": FOUND}),
    Command("export", "write a model in mixed precision for other programs", (
        *TARGET,
        Option("--to", choices=EXPORTS, required=True,
               help="pt2: for torch.export.load; onnx: for onnxruntime and others; aoti: compiled by AOTInductor"),
        Option("--output", metavar="FILE", required=True, help="the file to write"),
        Option("--fold-weights", action="store_true", help="store weights in low precision where all read them so"),
        Option("--opset", metavar="N", type=int, help="the version of ONNX (default: torch.onnx's)"),
        JSON,
    )),
    Command("cache", "list or remove the compiled C kernels", (
        Option("action", choices=("list", "clear"), help="list: print them; clear: remove them"), TRACEBACK, JSON,
    )),
    Command("completion", "print a script that completes this command in a shell", (
        Option("shell", choices=SHELLS, help="for which shell"), TRACEBACK,
    ), {"epilog": 'bash: eval "$(amp-graph completion bash)"'}),
    Command("run", "run a training script and convert what it trains; see amp-graph run --help", (
        Option("words", metavar="SCRIPT", nargs=argparse.REMAINDER, help=argparse.SUPPRESS),
        Option("-m", dest="module_words", metavar="MODULE", nargs=argparse.REMAINDER,
               help="run a module, as python -m does"),
        Option("--policy", metavar="P", help='as in amp_graph.convert: "bf16", "bf16,accuracy=fast"'),
        Option("--compile", metavar="C", default="eager", help="eager (default), inductor or another Dynamo backend"),
        Option("--only", metavar="REGEX", help="convert only modules whose class or path in the model matches"),
        Option("--dry-run", action="store_true", help="run as written, and say what would be converted"),
        Option("--report", metavar="FILE.html", help="write the HTML report of each converted model"),
        Option("--measure", action="store_true", help="time the first steps as written, convert then, and time again"),
        Option("--replace-autocast", action="store_true",
               help="convert models called under the script's own torch.autocast"),
        Option("--json", action="store_true", help="what was converted as JSON, in the last line of stderr"),
    ), {
        "usage": RUN_USAGE, "epilog": RUN_EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
        "description":
            "Run an unmodified training script, and convert the models that it trains to mixed precision.",
    }),
)  # fmt: skip


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
