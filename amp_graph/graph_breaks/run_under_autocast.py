"""Runs uncaptured code under ``torch.autocast``: the Python between partial graphs, and Python that reads dtypes.

Before: ``print(x)`` breaks the graph, and the code that Dynamo leaves out runs in fp32. After: that code runs under
``torch.autocast``, the graphs run by their plans, and they exchange values in the dtypes that autocast would produce.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from amp_graph.errors import warn
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, Runner

HINT = (
    "amp_graph: code that escapes capture was running under torch.autocast({kind!r}, {dtype}), where low and full "
    "precision can meet; policy 'escaped=fp32' runs it in fp32"
)

MIXED = re.compile(r"dtype|scalar type|Half|BFloat16|out of bounds for storage")
SPARSE = re.compile(r"sparse (?i:tensor)|sparse_\w+_tensor")


class NotWhole(Exception):
    """A call cannot be captured as one graph; raised before any part of it has run."""

    def __init__(self, owner: object) -> None:
        super().__init__("amp_graph: not captured as one graph")
        self.owner = owner


class NotKnown(NotWhole):
    """No partial graph's guards fit a call; it may be capturable as one graph."""


class AsksDtypes(NotWhole):
    """A call can be captured as one graph, but it creates values in dtypes that would differ under autocast."""


class WholeOnly(CaptureListener):
    """Listens to the capture of a call as one graph, and stops it once that is impossible."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.sparse: tuple[str, Any] | None = None  # the first graph break at a sparse tensor
        self._here = threading.local()

    def stop(self, reason: type[NotWhole]) -> None:
        """Record the backend's reason not to run the graph it was given."""
        self._here.stopped = reason

    def begins(self, code: types.CodeType) -> None:
        """Record that a capture begins."""
        self._here.stopped = None

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Stop before anything runs if the call is not one graph."""
        if code is self.code and (self._here.stopped or not whole):
            raise (self._here.stopped or NotWhole)(self)

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Stop before anything runs if the call cannot be traced as a whole."""
        if code is self.code:
            raise NotWhole(self)
        return False

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Ignore it; the capture of partial graphs reports skips."""

    def broke(self, reason: str, stack: Any) -> None:
        """Ignore it, except a break at a sparse tensor; the capture of partial graphs reports breaks."""
        if self.sparse is None and SPARSE.search(reason):
            self.sparse = reason, stack


class InPieces(CaptureListener):
    """Listens to the capture of partial graphs, forwards events to ``heard``, and stops unexpected captures."""

    is_whole = True  # until the capture of a whole call has failed

    def __init__(self, code: types.CodeType, heard: Any) -> None:
        self.code, self.heard = code, heard
        self._here = threading.local()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Allow new captures for calls of this thread."""
        before = getattr(self._here, "expected", False)
        self._here.expected = True
        try:
            yield
        finally:
            self._here.expected = before

    def begins(self, code: types.CodeType) -> None:
        """Stop before anything runs if this call was not tried as one graph first."""
        if code is self.code and not getattr(self._here, "expected", False):
            raise NotKnown(self)

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Accept any graph."""

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Record a failed trace; the code runs uncaptured and raises its own errors."""
        return bool(self.heard.failed(code, error))

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Record a frame that Dynamo skipped."""
        self.heard.skipped(code, reason)

    def broke(self, reason: str, stack: Any) -> None:
        """Record a graph break."""
        self.heard.broke(reason, stack)


class Escaping:
    """Runs a call as one graph if that can be captured, else as partial graphs under autocast.

    ``whole`` and ``pieces`` are captures of the same forward. Dynamo guards the autocast state, so ``pieces`` has its
    own code object, always captured and run under autocast. A call uses it after ``whole`` failed, or at once in a
    ``mode`` in which ``whole`` said that it asks for dtypes, or always with ``always``: there, code that reads
    ``x.dtype`` sees the dtypes of autocast. What a call computes in one mode does not depend on calls in another.
    """

    def __init__(
        self,
        whole: tuple[Runner, WholeOnly],
        pieces: tuple[Runner, InPieces],
        region: Callable[[], AbstractContextManager[tuple[str, torch.dtype]]],
        finish: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        attempt: Callable[[Runner, tuple[Any, ...], dict[str, Any]], Any],
        always: bool,
        mode: Callable[[], Hashable],
    ) -> None:
        self.whole, self.one = whole
        self.pieces, self.many = pieces
        self.region, self.finish, self.attempt = region, finish, attempt
        self.always, self.mode = always, mode
        self.asking = set[Hashable]()  # the modes in which calls are no longer tried as one graph
        self.broken = False  # whether any call ran as partial graphs
        self.retries = 1  # a first call may break at one-time setup, such as transformers' hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        if self.always or self.mode() in self.asking:
            with self.many.expected():
                return self._in_pieces(args, kwargs)
        if self.broken and self.retries:
            self.retries -= 1
        elif self.broken:
            try:
                return self._in_pieces(args, kwargs)
            except NotKnown as stopped:
                if stopped.owner is not self.many:
                    raise
        try:
            return self.whole(*args, **kwargs)
        except NotWhole as stopped:
            if stopped.owner is not self.one:
                raise
            if isinstance(stopped, AsksDtypes):
                self.asking.add(self.mode())
            else:
                self.broken, self.many.is_whole = True, False
        with self.many.expected():
            return self._in_pieces(args, kwargs)

    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.region() as (kind, dtype):
            try:
                result = self.attempt(self.pieces, args, kwargs)
            except (RuntimeError, TypeError) as error:
                explain(error, kind, dtype)
                raise
        return self.finish(result, args, kwargs)


@contextmanager
def autocast_region(kind: str, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    """Enter autocast, without the weight casts that an outer region of the user may have cached."""
    torch.clear_autocast_cache()
    try:
        with torch.autocast(kind, dtype=dtype):
            yield kind, dtype
    finally:
        torch.clear_autocast_cache()


def is_of_precision(error: Exception) -> bool:
    """Return whether ``error`` comes from mixed dtypes, or from an operation without a kernel for a low one."""
    return not isinstance(error, torch._dynamo.exc.TorchDynamoException) and bool(MIXED.search(str(error)))


def explain(error: Exception, kind: str, dtype: torch.dtype) -> None:
    """Add a note to a mixed-dtype error that says where the low precision comes from."""
    if not is_of_precision(error):
        return
    text = HINT.format(kind=kind, dtype=dtype)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    else:
        warn(text)


def without_autocast(run: Runner, kind: str) -> Runner:
    """Wrap ``run`` to disable autocast for devices of ``kind`` inside."""
    switch = torch.set_autocast_enabled

    def call(*args: Any) -> Any:
        switch(kind, False)
        try:
            return run(*args)
        finally:
            switch(kind, True)

    return call
