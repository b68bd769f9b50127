"""What is set while a graph is captured: Dynamo's settings, what torch logs, and Python's garbage collector.

Each name states the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config as dynamo_config  # 2.11 - 2.13
from torch._inductor import config as inductor_config  # 2.11 - 2.13

from amp_graph.passes.torch_compat import torch_version

# Dynamo's own limits (8 per code object, 256 in total) would turn the ninth shape into a silent fp32 run. Ours are a
# ``CaptureListener``.
NO_LIMIT = 1_000_000


class _AsWord(str):
    """A set of functions that is a word to JSON. Goes with torch 2.12, which logs an error if settings are not JSON."""

    functions: set[Any]

    def __new__(cls, functions: set[Any]) -> _AsWord:
        made = super().__new__(cls, "logging functions")
        made.functions = functions
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions


def ignored_logging() -> Any:
    """Return the logging functions that break no graph: the user's choice, and those that log once per process."""
    once = ("warning_once", "info_once", "warning_advice")  # of transformers
    said_once = {getattr(logging.Logger, name) for name in once if hasattr(logging.Logger, name)}
    # A capture inside of a capture finds a word where settings are not of 2.13.
    functions = {*dynamo_config.ignore_logging_functions, *said_once}
    return functions if torch_version() >= (2, 13) else _AsWord(functions)


# Makes an integer of a module symbolic after it has changed, as Dynamo does for arguments; 2.11 - 2.13.
CHANGING_INTS: dict[str, Any] = {"allow_unspec_int_on_nn_module": True}

# Profiler marks for what runs before a graph: two Python calls per call of the model.
NO_RECORDS: dict[str, Any] = (
    {"record_runtime_overhead": False} if hasattr(dynamo_config, "record_runtime_overhead") else {}
)

# Goes with torch 2.12: guards do not recheck parameters while no module attribute was assigned: frozen parameters, or
# parameters in another layout or precision, would be missed.
_TAGS = ("use_recursive_dict_tags_for_guards", "skip_tensor_guards_with_matching_dict_tags")
NO_TAGS: dict[str, Any] = dict.fromkeys(_TAGS, False) if torch_version() < (2, 13) else {}


def parameters_as_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo capture parameters as inputs in ``run``; Inductor's freezing makes them constants; 2.11 - 2.13."""

    def run_with_inputs(*args: Any, **kwargs: Any) -> Any:
        freezes = inductor_config.freezing and not torch.is_grad_enabled()
        with inductor_config.patch(freezing=False) if freezes else contextlib.nullcontext():
            return run(*args, **kwargs)

    return run_with_inputs


# What torch logs beside an error that it raises: of an operation on fake tensors, of a guard; 2.11 - 2.13.
_LOG_ERRORS = ("torch._subclasses.fake_tensor", "torch._guards", "torch.fx.experimental.symbolic_shapes")


@contextlib.contextmanager
def errors_not_logged() -> Iterator[None]:
    """Keep torch from logging errors in this thread: who catches them reports those that matter."""
    here = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno < logging.WARNING

    loggers = [logging.getLogger(name) for name in _LOG_ERRORS]
    for logger in loggers:
        logger.addFilter(is_kept)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_kept)


@contextlib.contextmanager
def collector_waits(asked: bool = True) -> Iterator[None]:
    """Switch the collector off inside, if it is on and if ``asked``.

    It is shared by all threads: the first of two captures to end switches it on again.
    """
    was_on = asked and gc.isenabled()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
