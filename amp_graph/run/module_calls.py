"""Sees the outermost call of each module, by a wrapper of ``torch.nn.Module.__call__``.

Before: ``model(x)``. After: ``heard.before(model)``, ``model(x)``, ``heard.after(...)``; calls within it are as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.compiler import is_compiling

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.dispatch import in_backward, is_autocast_on

Seen = TypeVar("Seen")


class Heard(Protocol, Generic[Seen]):
    """What is told of calls."""

    def before(self, module: torch.nn.Module) -> Seen | None:
        """Take note that ``module`` is about to be called, and by no other module; the result is given to others."""

    def under_autocast(self, seen: Seen) -> None:
        """Take note that ``seen`` calls a submodule under ``torch.autocast``."""

    def after(self, seen: Seen) -> None:
        """Take note that the call of ``seen`` returned."""

    def failed(self, error: Exception) -> None:
        """Take note that one of the others raised: the call goes on."""


class _Thread(threading.local):
    inside = False
    seen: Any = None  # what ``before`` returned


def hear(heard: Heard[Any]) -> Callable[[], None]:
    """Tell ``heard`` of all outermost calls from now on; the result ends that.

    Dynamo must be imported later than this: it takes the present ``Module.__call__`` for torch's own, and does not
    trace it.
    """
    plain: Callable[..., Any] = torch.nn.Module.__call__
    thread = _Thread()

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return plain(self, *args, **kwargs)
        if thread.inside:
            if thread.seen is not None and is_autocast_on():
                heard.under_autocast(thread.seen)
            return plain(self, *args, **kwargs)
        if in_backward():  # a checkpoint recomputes a part of what was seen
            return plain(self, *args, **kwargs)
        thread.inside = True
        try:
            seen = None
            with Attempt() as tried:
                seen = thread.seen = heard.before(self)
            if tried.error is not None:
                heard.failed(tried.error)
            result = plain(self, *args, **kwargs)
            with Attempt() as tried:
                if seen is not None:
                    heard.after(seen)
            if tried.error is not None:
                heard.failed(tried.error)
            return result
        finally:
            thread.inside, thread.seen = False, None

    torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def end() -> None:
        if torch.nn.Module.__call__ is __call__:
            torch.nn.Module.__call__ = plain  # type: ignore[method-assign]

    return end
