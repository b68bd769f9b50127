"""Loads a script or module, and runs it as ``python SCRIPT`` and ``python -m MODULE`` do.

``run(target, arguments, options)`` converts what it trains, and reports when it ends.
``__main__``, ``sys.argv``, ``sys.path[0]``, ``__file__``, tracebacks and exit codes are Python's own.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import itertools
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

import torch

from amp_graph.lists.errors import TAKERS, AmpGraphError, Attempt
from amp_graph.run.eligibility import needs_scale
from amp_graph.run.exit_report import exit_report, is_first_rank
from amp_graph.run.options import RunOptions
from amp_graph.run.trained_models import TrainedModels, hear

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS = tuple(os.path.join(PACKAGE, room, "") for room in ("run", "audit", "cli"))
# torch's own frames around those of a dispatch mode.
DISPATCH = tuple(os.path.join(os.path.dirname(torch.__file__), *file) for file in
                 (("_compile.py",), ("_dynamo", "eval_frame.py"), ("_ops.py",)))  # fmt: skip
FIX = "amp-graph {0} train.py [ARGS...], or amp-graph {0} -m package.train [ARGS...]"


class StepsAreOver(BaseException):
    """Ends a script after a number of steps; no ``except Exception`` of the script takes it."""


@dataclass(frozen=True)
class Target:
    """What is to run: its ``name`` as given, the file it is in, and what ``__main__`` is told."""

    name: str
    file: str
    first_path: str
    spec: ModuleSpec | None
    loader: Any
    code: Callable[[], types.CodeType]


def script_target(name: str, command: str = "run") -> Target:
    """Return the target of ``python NAME``; AmpGraphError if there is no such file. ``command``: that of amp-graph."""
    path = os.path.abspath(name)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise AmpGraphError(
            f"{command}: cannot run {name}: {error.strerror}\n  legal: a readable Python file\n"
            f"  fix:   {FIX.format(command)}"
        ) from error
    loader = SourceFileLoader("__main__", path)
    folder = os.path.dirname(os.path.realpath(path))
    return Target(name, path, folder, None, loader, lambda: compile(source, path, "exec", dont_inherit=True))


def module_target(name: str, command: str = "run") -> Target:
    """Return the target of ``python -m NAME``; AmpGraphError if there is no such module. Imports its parent package."""
    here = os.getcwd()
    put_first(here)
    reason = "there is no such module, or it is a package without a __main__ module"
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError, TypeError) as error:
        spec, reason = None, str(error)
    if spec is None or not hasattr(spec.loader, "get_code") or spec.origin is None:
        raise AmpGraphError(
            f"{command}: cannot run module {name}: {reason}\n"
            f"  legal: a module that can be imported from {here} or sys.path\n  fix:   {FIX.format(command)}"
        )
    loader: Any = spec.loader
    full = spec.name
    return Target(name, spec.origin, here, spec, loader, lambda: loader.get_code(full))


def put_first(folder: str) -> None:
    """Put ``folder`` in the place of what Python put first in ``sys.path`` for the command that runs now."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder]


def execute(target: Target, arguments: list[str]) -> None:
    """Run ``target`` as ``__main__``; what it raises leaves this function."""
    sys.argv = [target.name if target.spec is None else target.file, *arguments]
    put_first(target.first_path)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        {
            "__builtins__": builtins,
            "__file__": target.file,
            "__loader__": target.loader,
            "__spec__": target.spec,
            "__package__": None if target.spec is None else target.spec.parent,
            "__cached__": None if target.spec is None else target.spec.cached,
        }
    )
    sys.modules["__main__"] = main
    exec(target.code(), main.__dict__)


def raised_by(call: Callable[[], None]) -> BaseException | None:
    """Return what ``call`` raises, SystemExit and KeyboardInterrupt included: a report is printed before it goes on."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def without_our_frames(error: BaseException | None, done: set[int]) -> None:
    """Take the frames that lead to the script, and to its modules, out of the traceback of ``error`` and its causes."""
    if error is None or id(error) in done:
        return
    done.add(id(error))
    may_be_ours = itertools.groupby(_chain(error.__traceback__), lambda it: _file(it).startswith((*OURS, *DISPATCH)))
    runs = [list(run) for _, run in may_be_ours]
    theirs = [found for run in runs if not any(_file(found).startswith(OURS) for found in run) for found in run]
    for found, after in zip(theirs, [*theirs[1:], None], strict=False):
        found.tb_next = after
    error.__traceback__ = theirs[0] if theirs else None
    without_our_frames(error.__cause__, done)
    without_our_frames(error.__context__, done)


def _file(found: types.TracebackType) -> str:
    return found.tb_frame.f_code.co_filename


def _chain(found: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next


def raise_as_python_does(error: BaseException) -> None:
    """Print an exception that left the script, and end the process with it as Python does.

    The traceback would get the frames of ``amp-graph`` on its way up, so it is printed here, by the script's own
    ``sys.excepthook``; Python then prints nothing, and exits with the status or signal of the exception.
    """
    if not isinstance(error, SystemExit):
        without_our_frames(error, set())
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *printed_already: None
    raise error


# -- with all that sees its models, and the report at its end -----------------------------------------


def run(target: Target, arguments: list[str], options: RunOptions) -> int:
    """Run ``target`` with ``arguments``, converting what it trains; return 0 if it ends without an exception."""
    notes: Counter[str] = Counter()
    TAKERS.append(lambda text: notes.update([text]))
    models = TrainedModels(options, lambda text: notes.update([text]))
    hear(models.before, models.after, models.under_autocast, models.failed)
    if needs_scale(options.policy):
        models.scaling.start()
    return run_and_tell(lambda: execute(target, arguments), lambda: _report(models, notes))


def run_and_tell(call: Callable[[], None], tell: Callable[[], int]) -> int:
    """Run ``call``, then ``tell``, in this process alone and not in its forks; return the exit status.

    It is that of ``tell`` if that is not 0 and the script ended well; what the script raises is raised.
    """
    process = os.getpid()
    failure = raised_by(call)
    status = tell() if os.getpid() == process else 0
    if failure is not None and not (status and isinstance(failure, SystemExit) and failure.code in (None, 0)):
        raise_as_python_does(failure)
    return status


def _report(models: TrainedModels, notes: Counter[str]) -> int:
    """Print what was converted; nothing here may change how the script ended."""
    models.stop()
    if not is_first_rank():
        return 0
    text = ""
    with Attempt() as tried:
        text = exit_report(models, notes)
    if tried.error is not None:
        text = f"amp-graph run: the exit report failed: {tried.reason}"
    with contextlib.suppress(OSError, ValueError):  # closed by the script
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    return 0
