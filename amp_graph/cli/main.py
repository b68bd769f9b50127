"""The command line: ``amp-graph run | dump | explain | lists | plan | cost | export | ...``.

``main(["dump", "model.py:build", "--input", "x=f32[8,16]"])`` prints, and returns the exit status. Nothing
here imports torch until a command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from amp_graph.version import __version__

FORMATS = ("text", "json", "report", "html")
STEPS = ("SGD", "Adam", "AdamW", "Adagrad")
FOUND = "Exit status: 0 if loss and gradients are finite, 3 if not, 1 for an error, 2 for an unreadable command line."
BUDGETS = "0.5,0.75,0.9,1,1.1,1.25,1.5,2,3"
TARGET = "package.module:name or path/file.py:name, which is or returns a module, or (module, inputs)"
INPUT = 'an input to make: "x=f32[8,3,224,224],y=i64[8]:0..999"; instead of the inputs that TARGET gives'
POLICY = '"bf16", "fp16-O1,accuracy=fast", "bf16,keep_fp32=lm_head|.*norm"'
LEVELS = ("note", "warning", "error")
SCRIPT_USAGE = """amp-graph {0} [OPTIONS] SCRIPT [ARGS...]
       amp-graph {0} [OPTIONS] -m MODULE [ARGS...]"""
TARGET_USAGE = """
       amp-graph audit [OPTIONS] TARGET [--input SPEC...]"""
AUDIT_EPILOG = """\
All words after SCRIPT or MODULE are the script's own; nothing of it is changed. TARGET is model.py:build, a model that
is called once, with its backward. Exit status: the script's; 2 if it was not started; with --fail-on, 1 for a finding
of its level, and 3 if nothing was looked at. A comment "# amp: ignore[AMP101]" at the line of a finding, or above it,
leaves the finding out.
With several processes: torchrun --nproc-per-node 2 -m amp_graph audit SCRIPT; rank 0 prints.
"""
RUN_EPILOG = """\
All words after SCRIPT or MODULE are the script's own. Exit status: the script's; 2 if it was not started.
Environment: AMP_GRAPH_POLICY is the policy without --policy.
With several processes: torchrun --nproc-per-node 2 -m amp_graph run SCRIPT, accelerate launch -m amp_graph run SCRIPT.
"""
EPILOG = "Exit status: 0, 1 for an error, 2 for a command line that cannot be read."


# -- the commands and their options -------------------------------------------------------------------


Argument = tuple[tuple[str, ...], dict[str, Any]]


def arg(*names: str, **properties: Any) -> Argument:
    """Return an argument, as ``add_argument`` takes it."""
    return names, properties


def flag(name: str, help: str, **properties: Any) -> Argument:
    """Return an option without a value."""
    return (name,), {"action": "store_true", "help": help, **properties}


Group = list[Argument]  # arguments that exclude each other
TAKES_TARGET = (
    arg("target", metavar="TARGET", help=TARGET),
    arg("--input", metavar="SPEC", action="append", default=[], help=INPUT),
    arg("--policy", metavar="P", help=POLICY),
    [flag("--train", "model.train() first", dest="training", default=None),
     flag("--eval", "model.eval() first", dest="training", action="store_false")],
)  # fmt: skip
TAKES_BATCH = (
    arg("--batch", metavar="FILE", help="a batch that torch.save((inputs, *targets), FILE) wrote"),
    arg("--loss", metavar="LOSS", help="package.module:name or path/file.py:name, called as loss(outputs, *targets)"),
)
TAKES_SCRIPT = (
    arg("words", metavar="SCRIPT", nargs=argparse.REMAINDER, help=argparse.SUPPRESS),
    arg("-m", dest="module_words", metavar="MODULE", nargs=argparse.REMAINDER,
        help="run a module, as python -m does"),
)  # fmt: skip
OF_SCRIPT = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
JSON = flag("--json", "print JSON")
DEVICE = arg("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
COMMANDS: dict[str, tuple[str, tuple[Argument | Group, ...], dict[str, Any]]] = {
    "dump": ("print the captured graphs of a model", (
        *TAKES_TARGET,
        [arg("--format", choices=FORMATS, default="text", help="how to print (default: text)"),
         flag("--json", "print JSON: --format json", dest="format", action="store_const", const="json")],
        [flag("--before", "print the graph as captured"),
         flag("--diff", "print the difference of the graph as captured and as rewritten"),
         flag("--reasons", "append each node's precision and reason"),
         arg("--step", nargs="?", const="AdamW", choices=STEPS,
             help="print the whole training step (default: AdamW)")],
        flag("--skipped", "with --format report: also what passes left as it was, and why"),
        arg("--output", metavar="FILE", help="write to FILE instead of stdout"),
    ), {}),
    "explain": ("print all that is known about one node", (
        *TAKES_TARGET, arg("node", metavar="NODE", help="%%7, a name, a module, an operation or layers.3:add.1"), JSON,
    ), {}),
    "lists": ("print which class an operation is in, and why", (
        arg("op", metavar="OP", nargs="?", help="such as gelu or aten.pow.Tensor_Scalar"), DEVICE,
        arg("--policy", metavar="P", help=POLICY), JSON,
    ), {}),
    "calibrate": ("measure this machine's rates, which plans read", (
        arg("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default: cpu)"),
        arg("--output", metavar="FILE", help="default: the file that plans read"),
        JSON,
    ), {}),
    "cost": ("measure whether low precision pays: fp32, torch.autocast and the plan", (*TAKES_TARGET, JSON), {}),
    "plan": ("predict speed and error of a plan, and of error budgets", (
        *TAKES_TARGET,
        arg("--sweep", metavar="BUDGETS", nargs="?", const=BUDGETS,
            help=f"also predict the plans of a list of error budgets (default: {BUDGETS})"),
        JSON,
    ), {}),
    "search": ("find the fastest policy that is exact enough, by measuring", (
        arg("target", metavar="TARGET", nargs="?", help=TARGET),
        *TAKES_TARGET[1:],
        *TAKES_BATCH,
        arg("--script", metavar="SCRIPT", nargs=argparse.REMAINDER,
            help="instead of TARGET, the model and the first steps of a training script; all words after it are its "
                 "own; -m MODULE for a module"),
        arg("--held-out", metavar="FILE", help="another batch, on which the answer must be as exact"),
        arg("--budget", metavar="B", type=float,
            help="the largest error, as a multiple of torch.autocast's (default: 1)"),
        arg("--absolute", metavar="E", type=float, help="the largest relative error itself, instead of --budget"),
        arg("--runs", metavar="N", type=int, default=25, help="the most policies to measure (default: 25)"),
        arg("--seconds", metavar="S", type=float, default=float("inf"), help="the most time"),
        arg("--state", metavar="FILE", help="keep what was measured in FILE, and go on from there"),
        arg("--report", metavar="FILE.html", help="write a page with a curve of times and errors, and the table"), JSON,
    ), {}),
    "locate": ("name the operation that makes an infinity or NaN", (
        *TAKES_TARGET,
        *TAKES_BATCH,
        arg("--scale", metavar="S", type=float, help="the loss scale (default: 1)"), JSON,
    ), {"epilog": FOUND}),
    "export": ("write a model in mixed precision for other programs", (
        *TAKES_TARGET,
        arg("--to", choices=("pt2", "onnx"), required=True,
            help="pt2: for torch.export.load; onnx: for onnxruntime and others"),
        arg("--output", metavar="FILE", required=True, help="the file to write"),
        flag("--fold-weights", "store weights in low precision where all read them so"),
        arg("--opset", metavar="N", type=int, help="the version of ONNX (default: torch.onnx's)"), JSON,
    ), {}),
    "audit": ("run a training script as it is, and say what its precision does; see amp-graph audit --help", (
        *TAKES_SCRIPT,
        arg("--every", metavar="N", type=int, default=0, help="look at each Nth step, beside the 2nd and the 3rd"),
        arg("--steps", metavar="N", type=int, help="end the script after N steps"),
        arg("--json", metavar="FILE", help="write the findings and the table as JSON to FILE"),
        arg("--report", metavar="FILE.html", help="write a page of the findings and the table"),
        arg("--fail-on", metavar="LEVEL", choices=LEVELS, default="",
            help="note, warning or error: exit status 1 for a finding of that level or above, 3 if nothing was seen"),
        arg("--ignore", metavar="CODES", type=lambda text: re.findall(r"[^\s,]+", text), default=[],
            help="leave out findings: AMP101,AMP503"),
    ), {"usage": SCRIPT_USAGE.format("audit") + TARGET_USAGE, "epilog": AUDIT_EPILOG, **OF_SCRIPT, "description":
        "Run an unmodified training script, and say what precision it uses and what is wrong with that."}),
    "run": ("run a training script and convert what it trains; see amp-graph run --help", (
        *TAKES_SCRIPT,
        arg("--policy", metavar="P", help='as in amp_graph.convert: "bf16", "bf16,accuracy=fast"'),
        arg("--compile", metavar="C", default="eager", help="eager (default), inductor or another Dynamo backend"),
        flag("--dry-run", "run as written, and say what would be converted"),
        arg("--report", metavar="FILE.html", help="write the HTML report of each converted model"),
        flag("--replace-autocast", "convert models called under the script's own torch.autocast"),
        flag("--json", "what was converted as JSON, in the last line of stderr"),
    ), {"usage": SCRIPT_USAGE.format("run"), "epilog": RUN_EPILOG, **OF_SCRIPT, "description":
        "Run an unmodified training script, and convert the models that it trains to mixed precision."}),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "amp-graph", description="Which operation of a model runs in which precision, and why.", epilog=EPILOG
    )
    made.add_argument("--version", action="version", version=f"amp-graph {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (help, arguments, properties) in COMMANDS.items():
        one = commands.add_parser(name, help=help, **{"epilog": EPILOG, **properties})
        for argument in arguments:
            group = one.add_mutually_exclusive_group() if isinstance(argument, list) else one
            for names, how in argument if isinstance(argument, list) else [argument]:
                group.add_argument(*names, **how)
        one.set_defaults(module=f"amp_graph.cli.command_{name}")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; our errors go to stderr, those of the user's code are Python's."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version, or a usage error that argparse has printed
        return int(stop.code or 0)
    args.command_line = ["amp-graph", *(sys.argv[1:] if argv is None else argv)]
    run: Callable[[argparse.Namespace], Any] = importlib.import_module(args.module).run
    from amp_graph.errors import AmpGraphError

    is_script = "words" in vars(args)
    try:
        told = run(args)
        if not is_script:
            sys.stdout.write(told.text(as_json=bool(vars(args).get("json"))))
            return int(told.status)
    except AmpGraphError as error:
        print(error, file=sys.stderr)
        return 2 if is_script else 1
    except BrokenPipeError:  # the reader of our output closed it: `amp-graph dump ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(told())  # the script's own errors and exit status are passed on
