"""Captures a function with Dynamo, and reports what was not captured: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config as dynamo_config  # 2.11 - 2.13
from torch._dynamo import lookup_backend as lookup_backend  # 2.11 - 2.13
from torch._dynamo.convert_frame import compile_lock  # 2.11 - 2.13: held by each of Dynamo's captures
from torch._guards import TracingContext  # 2.11 - 2.13
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,  # 2.11 - 2.13
    GuardOnDataDependentSymNode,  # 2.11 - 2.13
)
from torch.fx.experimental.validator import ValidationException  # 2.11 - 2.13

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat import torch_version
from amp_graph.passes.torch_compat.dynamo_entries import compiled_entries, is_whole
from amp_graph.passes.torch_compat.dynamo_patches import masks_heard, mended
from amp_graph.passes.torch_compat.dynamo_settings import (
    NO_LIMIT,
    NO_RECORDS,
    NO_TAGS,
    collector_waits,
    errors_not_logged,
    ignored_logging,
)
from amp_graph.passes.torch_compat.fake import keep_guard_of_missing_gpu

Runner = Callable[..., Any]  # runs what was captured
dynamo_errors: Any = torch._dynamo.exc  # 2.11 - 2.13
dynamo_types: Any = torch._dynamo.types  # exports its names, but not explicitly; 2.11 - 2.13


def _with_room(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with a chunk of Python's stack in front that has room for all nested calls.

    The interpreter maps that stack in chunks of 16 KB, and unmaps each when the call that opened it returns. Where
    Dynamo's recursion crosses such an edge, 9,800 times in the capture of a small BERT, this takes a tenth of the time.
    A frame larger than a chunk gets one of its own, of at most twice its size: nested calls use the rest.
    """
    return function(*args, **kwargs)


if sys.version_info >= (3, 11):  # before, each frame has its own memory
    _with_room.__code__ = _with_room.__code__.replace(co_stacksize=70_000)  # in words: 0.55 MB, of 1 MB that is mapped


class CaptureListener:
    """Receives events of Dynamo's captures, and says with which settings each is made; this one ignores them."""

    def failed(self, code: types.CodeType, error: Exception, *, whole: bool) -> bool:
        """Tracing a frame failed, that of a ``whole`` call or a part; return whether the frame is to run as written.

        Exceptions reach the caller, and Dynamo caches nothing of the frame.
        """
        return False

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """A frame was skipped: it runs as written."""

    def broke(self, reason: str, stack: Any) -> None:
        """A graph break."""

    def settings(self, frame: Any) -> dict[str, Any] | None:
        """Return the settings for a capture of ``frame``, or None to skip it: the frame then runs as written.

        Exceptions reach the caller, before any of the frame has run.
        """
        return {}

    def made(self, frame: Any) -> None:
        """The capture of ``frame`` has produced compiled code."""


def failed_guards(frame: Any) -> list[tuple[str, Any]]:
    """Return for each compiled code of ``frame`` the first guard that fails, and the stack where it was made.

    "L['x'].calls == 1   # self.calls += 1  # model.py:7 in forward", as Dynamo prints it; 2.11 - 2.13.
    """
    found = []
    for entry in compiled_entries(frame.f_code):
        with Attempt():  # what a guard reads may be freed: then there is nothing to report
            info = entry.guard_manager.check_verbose(frame.f_locals)
            if not info.result:  # guards on sizes are checked as one
                found.append((" and ".join(info.verbose_code_parts), getattr(info, "user_stack", None)))
    return found


def is_remembered(code: types.CodeType) -> bool:
    """Say whether Dynamo has met ``code`` since the last ``torch._dynamo.reset()``; 2.11 - 2.13."""
    return code in torch._dynamo.convert_frame.input_codes


# Errors of Dynamo's own tracing that running the code might not raise: of fake tensors, of unbacked sizes, of a dynamic
# mark that does not hold. Other errors come from a backend, or are requested by a Dynamo setting; 2.11 - 2.13.
_TRACING_FAILED = (
    dynamo_errors.TorchRuntimeError,
    dynamo_errors.InternalTorchDynamoError,
    dynamo_errors.Unsupported,
    dynamo_errors.UserError,
    dynamo_errors.UncapturedHigherOrderOpError,
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ValidationException,
    AssertionError,  # from the conversion to fake tensors
    IndexError,  # for a dimension out of range
)


class _CompileTimeConfig:
    """A Dynamo frame callback that sets Dynamo's limits, and mends it, while it compiles, and only then.

    Setting them globally would change the user's own ``torch.compile``; setting them around each call
    would cost every step. ``code``: of the captured function, whose frame is a whole call.
    """

    def __init__(
        self, inner: Any, code: types.CodeType, heard: CaptureListener, collector_waits: bool, choice: CaptureListener
    ) -> None:
        self._inner = inner
        self._code = code
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
        with (
            compile_lock,  # up to torch 2.12, Dynamo's settings are shared by all threads
            errors_not_logged(),
            collector_waits(self._collector_waits),
            dynamo_config.patch(
                allow_rnn=True,
                # Boolean masks and .item() become graph nodes instead of graph breaks (which, inside a Python
                # loop, would lose the whole frame).
                capture_dynamic_output_shape_ops=True,
                capture_scalar_outputs=True,
                # A hook that is registered later must fire; by default Dynamo does not check, for speed. The cost is
                # not measurable.
                skip_nnmodule_hook_guards=False,
                ignore_logging_functions=ignored_logging(),
                recompile_limit=NO_LIMIT,
                accumulated_recompile_limit=NO_LIMIT,
                **NO_RECORDS,
                **NO_TAGS,
                **chosen,
            ),
        ):
            try:
                result = self._captured(frame, *args, **kwargs)
            except _TRACING_FAILED as error:
                if not self._heard.failed(frame.f_code, error, whole=frame.f_code is self._code):
                    raise
                if compiled_entries(frame.f_code):
                    return _as_written_once()
                return dynamo_types.ConvertFrameReturn()  # the frame runs as written, like any skipped one
        for reason in break_reasons()[known:]:
            self._heard.broke(str(reason.reason), reason.user_stack)
        if getattr(result, "guarded_code", None) is not None:
            self._choice.made(frame)
        else:
            self._heard.skipped(frame.f_code, str(getattr(result, "skip_reason", None) or ""))
        return result

    def _captured(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        """Trace ``frame``; again, if masks of transformers heard of the capture of a call that is not one graph.

        Nothing of the frame has run by then. What follows a graph break would get a mask that eager code never sees.
        """
        known = len(break_reasons())
        with mended(tells_masks=frame.f_code is self._code) as masks:
            try:
                result = _with_room(self._inner, frame, *args, **kwargs)
            except _TRACING_FAILED:
                if not (masks.told and masks.asked):
                    raise
            else:
                made = getattr(result, "guarded_code", None)
                if not (masks.told and masks.asked) or (made is not None and is_whole(made.code)):
                    return result
        del break_reasons()[known:]
        with mended(tells_masks=False):
            return _with_room(self._inner, frame, *args, **kwargs)


def _as_written_once() -> Any:
    """Return what runs a frame as written once, while its calls still use compiled code; 2.11 - 2.13."""
    run = dynamo_types.FrameExecStrategy(dynamo_types.FrameAction.SKIP, dynamo_types.FrameAction.RUN_ONLY)
    return dynamo_types.ConvertFrameReturn(frame_exec_strategy=run, apply_to_code=False)


def capture_with_dynamo(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    fullgraph: bool,
    heard: CaptureListener,
    collector_waits: bool,
    choice: CaptureListener | None = None,
    eager: bool = False,
) -> Callable[..., Any]:
    """Return ``function`` captured by Dynamo into ``backend``; ``heard`` is told what was not captured.

    ``choice``: consulted before each capture; None: ``heard`` is. ``collector_waits``: pause garbage collection until
    Dynamo and ``backend`` are done; not for compilers that take minutes. ``eager``: graphs run operator by operator.
    2.13 has ``isolate_recompiles`` (entries of one region never count against another's); 2.11 and 2.12 rely on the
    raised limits and on a separate code object.
    """
    keep_guard_of_missing_gpu()

    def take(gm: GraphModule, example_inputs: Any) -> Any:
        if masks_heard() and ends_in_break(gm):  # it is traced again
            return gm.forward
        if eager:
            _leave_out_guard_of_hooks()
        return backend(gm, example_inputs)

    isolated = {"isolate_recompiles": True} if torch_version() >= (2, 13) else {}  # always, with torch 2.12 gone
    context: Any = torch._dynamo.optimize(take, nopython=fullgraph, dynamic=dynamic, **isolated)
    callback = context.callback
    context.callback = _CompileTimeConfig(callback, function.__code__, heard, collector_waits, choice or heard)
    return context(function)


def _leave_out_guard_of_hooks() -> None:
    """Keep the running capture from guarding on the default saved-tensor hooks; 2.11 - 2.13.

    Where a graph runs operator by operator, under autograd itself, the hooks that are active in a call see what that
    call saves. AOTAutograd traces hooks into a graph, which is why there is such a guard. It is the only one in Python:
    2 us of a call, with cold caches.
    """
    guards = TracingContext.get().guards_context.dynamo_guards.inner
    for guard in [guard for guard in guards if guard.create_fn_name() == "AUTOGRAD_SAVED_TENSORS_HOOKS"]:
        guards.remove(guard)


def ends_in_break(gm: GraphModule) -> Any:
    """Return what Dynamo says of the graph break that ends ``gm``: its reason and stack; None if none ends it."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    return reason if getattr(reason, "graph_break", False) else None


@contextlib.contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """Keep other threads from capturing while a graph is traced outside of Dynamo, which patches modules for all.

    They may still call captured graphs: ``is_compiling`` distinguishes this trace from ``fx.symbolic_trace``, during
    which Dynamo refuses to be called, in any thread. torch/fx/_symbolic_trace.py, torch/compiler/__init__.py; 2.11 -
    2.13.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def allow_in_graph(function: type) -> None:
    """Let Dynamo put calls of an ``autograd.Function`` into graphs as they are, without tracing into them."""
    torch._dynamo.allow_in_graph(function)


def break_reasons() -> list[Any]:
    """Return the list to which Dynamo appends the reason of every graph break, also of graphs without nodes."""
    return torch._dynamo.utils.graph_break_reasons
