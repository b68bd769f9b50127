"""Captures a function by Dynamo, and says what was not captured: private names of torch.

Each with the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config as dynamo_config  # 2.11 - 2.13
from torch._dynamo.convert_frame import compile_lock  # 2.11 - 2.13: held by each of Dynamo's captures
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,  # 2.11 - 2.13
    GuardOnDataDependentSymNode,  # 2.11 - 2.13
)
from torch.fx.experimental.validator import ValidationException  # 2.11 - 2.13

from amp_graph.passes.torch_compat.dynamo_frames import is_whole
from amp_graph.passes.torch_compat.dynamo_patches import (
    capture_some_otherwise,
    capturing,
    leave_cast_cache_alone,
    leave_out_guard_timing,
    let_masks_broadcast,
    record_reads_of_dtype,
    see_loops_to_their_end,
)
from amp_graph.passes.torch_compat.dynamo_settings import NO_LIMIT, NO_RECORDS, NO_TAGS, ignored_logging
from amp_graph.passes.torch_compat.gc_pause import collector_waits
from amp_graph.passes.torch_compat.versions import torch_version


def _with_room(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with a piece of Python's stack before it that holds all the calls inside.

    The interpreter maps that stack in pieces of 16 KB, and unmaps each when the call that opened it returns: where
    Dynamo's recursion comes and goes over such an edge, 9,800 times in a small BERT's capture, for a tenth of its time.
    A frame that is larger than a piece is given one of its own, of twice its size at most: the rest is for others.
    """
    return function(*args, **kwargs)


if sys.version_info >= (3, 11):  # before, each frame has memory of its own
    _with_room.__code__ = _with_room.__code__.replace(co_stacksize=70_000)  # in words: 0.55 MB, of 1 MB that are mapped


class CaptureListener:
    """Hears of what Dynamo captured and did not; this one does nothing.

    What ``begins`` and ``ended`` raise reaches the caller: nothing of the frame has run by then, and Dynamo remembers
    nothing of it.
    """

    def begins(self, code: types.CodeType) -> None:
        """Hear that a frame will be captured, for which there was no compiled code."""

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Hear that a frame was captured: ``whole``, as one graph, or not."""

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Hear that tracing a frame failed; say whether the frame is to run as it was written."""
        return False

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Hear that a frame runs as it was written."""

    def broke(self, reason: str, stack: Any) -> None:
        """Hear that a graph ended before its frame did."""


class CaptureChoice:
    """Chooses whether a frame is captured once more, and with which of Dynamo's settings; this one always does."""

    def settings(self, frame: Any) -> dict[str, Any] | None:
        """Return settings for the capture of ``frame`` that begins, or None for none: it runs as it is written.

        What is raised reaches the caller, before anything of the frame has run.
        """
        return {}

    def made(self, frame: Any) -> None:
        """Hear that the capture of ``frame`` gave compiled code."""


def failed_guards(frame: Any) -> list[tuple[str, Any]]:
    """Return for each compiled code of ``frame`` the first guard that refuses it, and the stack that it is from.

    "L['x'].calls == 1   # self.calls += 1  # model.py:7 in forward", as Dynamo tells it; 2.11 - 2.13.
    """
    entries: Any = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    found = []
    for entry in entries(frame.f_code) if entries is not None else ():
        try:
            info = entry.guard_manager.check_verbose(frame.f_locals)
            parts = [] if info.result else list(info.verbose_code_parts)
            if len(parts) > 1:  # the guards on sizes, which are checked as one
                parts = [part for part in parts if _is_false(part, entry.guard_manager, frame.f_locals)]
        except Exception:  # what a guard looks at may be gone: there is nothing to tell then
            continue
        found += [(part, getattr(info, "user_stack", None)) for part in parts[:1]]
    return found


def is_remembered(code: types.CodeType) -> bool:
    """Say whether Dynamo has met ``code`` since ``torch._dynamo.reset()`` was last called; 2.11 - 2.13."""
    return code in torch._dynamo.convert_frame.input_codes


def _is_false(part: str, manager: Any, local: dict[str, Any]) -> bool:
    """Say whether one of Dynamo's guards refuses these locals."""
    scope = {"L": local, "G": manager.global_scope["G"], **manager.closure_vars}
    return not eval(part, dict(manager.global_scope), scope)


# What is raised of Dynamo's own tracing, where running the code might not be: by fake tensors, by sizes without a
# number, by a mark of a dynamic size that does not hold. What is raised otherwise is a backend's, or asked for by a
# setting of Dynamo's; 2.11 - 2.13.
_TRACING_FAILED = (
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.InternalTorchDynamoError,
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.UserError,
    torch._dynamo.exc.UncapturedHigherOrderOpError,
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ValidationException,
    AssertionError,  # of the conversion to fake tensors
    IndexError,  # of a dimension out of range
)

# Before 2.13 Dynamo's settings are those of all threads: the later of two captures would restore the earlier one's.
_ONE_AT_A_TIME: contextlib.AbstractContextManager[Any] = (
    contextlib.nullcontext() if torch_version() >= (2, 13) else threading.RLock()
)

_CAPTURES: list[None] = []  # one for each capture of ours that runs, in whatever thread


def a_capture_runs() -> bool:
    """Say whether some thread captures a converted model: it has aliases of the model's parameters meanwhile."""
    return bool(_CAPTURES)


class _CompileTimeConfig:
    """A Dynamo frame callback that sets Dynamo's limits while it compiles, and only then.

    Setting them globally would change the user's own ``torch.compile``; setting them around each call
    would cost every step.
    """

    def __init__(self, inner: Any, heard: CaptureListener, collector_waits: bool, choice: CaptureChoice) -> None:
        self._inner = inner
        self._heard = heard
        self._choice = choice
        self._collector_waits = collector_waits
        # Read by Dynamo's C++ side to find the backend of a cache entry: must be a plain attribute.
        self._torchdynamo_orig_backend = inner
        self.hooks = inner.hooks

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        known = len(break_reasons())
        chosen = self._choice.settings(frame)
        if chosen is None:
            return _as_written_once()
        self._heard.begins(frame.f_code)
        with (
            _ONE_AT_A_TIME,
            collector_waits(self._collector_waits),
            dynamo_config.patch(
                allow_rnn=True,
                # Boolean masks and .item() become graph nodes instead of graph breaks (which, inside a Python
                # loop, would lose the whole frame).
                capture_dynamic_output_shape_ops=True,
                capture_scalar_outputs=True,
                # A hook that is registered later must fire; Dynamo does not look, for speed. Costs nothing measurable.
                skip_nnmodule_hook_guards=False,
                ignore_logging_functions=ignored_logging(),
                recompile_limit=NO_LIMIT,
                accumulated_recompile_limit=NO_LIMIT,
                **NO_RECORDS,
                **NO_TAGS,
                **chosen,
            ),
        ):
            outer, capturing.is_on = capturing.is_on, True
            _CAPTURES.append(None)
            try:
                result = _with_room(self._inner, frame, *args, **kwargs)
            except _TRACING_FAILED as error:
                if not self._heard.failed(frame.f_code, error):
                    raise
                return torch._dynamo.types.ConvertFrameReturn()  # the frame runs as it was written, as any skipped one
            finally:
                _CAPTURES.pop()
                capturing.is_on = outer
        for reason in break_reasons()[known:]:
            self._heard.broke(str(reason.reason), reason.user_stack)
        made = getattr(result, "guarded_code", None)
        if made is not None:
            self._choice.made(frame)
        else:
            self._heard.skipped(frame.f_code, str(getattr(result, "skip_reason", None) or ""))
        self._heard.ended(frame.f_code, made is not None and is_whole(made.code))
        return result


def _as_written_once() -> Any:
    """Return what has a frame run as it was written, this time, and what it calls on what is compiled; 2.11 - 2.13."""
    types_of: Any = torch._dynamo.types  # exports these names, but does not say so
    run = types_of.FrameExecStrategy(types_of.FrameAction.SKIP, types_of.FrameAction.RUN_ONLY)
    return types_of.ConvertFrameReturn(frame_exec_strategy=run, apply_to_code=False)


def capture_with_dynamo(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    fullgraph: bool,
    heard: CaptureListener,
    collector_waits: bool,
    choice: CaptureChoice | None = None,
) -> Callable[..., Any]:
    """Return ``function`` captured by Dynamo into ``backend``; ``heard`` is told what was not captured.

    ``choice``: what is asked before each capture.
    ``collector_waits``: until Dynamo and ``backend`` are done, which is not for compilers that take minutes.
    2.13 has ``isolate_recompiles`` (entries of one region never count against another's); 2.11 and 2.12
    rely on the raised limits and on the code object of its own.
    """
    record_reads_of_dtype()
    capture_some_otherwise()
    leave_out_guard_timing()
    leave_cast_cache_alone()
    let_masks_broadcast()
    see_loops_to_their_end()
    optimize = torch._dynamo.optimize
    known = inspect.signature(torch._dynamo.eval_frame._optimize).parameters
    extra = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    context: Any = optimize(backend, nopython=fullgraph, dynamic=dynamic, **extra)
    context.callback = _CompileTimeConfig(context.callback, heard, collector_waits, choice or CaptureChoice())
    return context(function)


@contextlib.contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """Keep other threads from capturing while a graph is traced outside of Dynamo, which patches modules for all.

    And let them call what was captured: by ``is_compiling`` torch tells a trace from ``fx.symbolic_trace``, amid which
    Dynamo refuses to be called, in any thread. torch/fx/_symbolic_trace.py, torch/compiler/__init__.py; 2.11 - 2.13.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def allow_in_graph(function: type) -> None:
    """Let Dynamo put calls of an ``autograd.Function`` into graphs as they are, instead of tracing into them."""
    torch._dynamo.allow_in_graph(function)


def break_reasons() -> list[Any]:
    """Return the list to which Dynamo appends the reason of every graph break, graphs without nodes included."""
    return torch._dynamo.utils.graph_break_reasons
