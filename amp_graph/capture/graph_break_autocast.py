"""What escapes capture: the Python between captured graphs, and dtypes that Python reads, as under ``torch.autocast``.

Before: ``print(x)`` splits a forward, and what Dynamo leaves out with it multiplies in fp32. After: it multiplies as
under ``torch.autocast``, the graphs around it run by their plans, and both meet in the dtypes that autocast would give.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from amp_graph.capture.dynamo_backend import Runner
from amp_graph.errors import warn
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener

HINT = (
    "amp_graph: code that escaped capture was running under torch.autocast({kind!r}, {dtype}), where low and full "
    "precision can meet; policy 'escaped=fp32' runs it in fp32"
)

MIXED = re.compile(r"dtype|scalar type|Half|BFloat16|out of bounds for storage")
SPARSE = re.compile(r"sparse (?i:tensor)|sparse_\w+_tensor")


class NotWhole(Exception):
    """A call cannot be captured as one graph; raised before any of it has run."""

    def __init__(self, owner: object) -> None:
        super().__init__("amp_graph: not captured as one graph")
        self.owner = owner


class NotKnown(NotWhole):
    """No compiled code fits a call that would run in pieces: it may be one that can be captured whole."""


class AsksDtypes(NotWhole):
    """A call can be captured as one graph, but makes values in dtypes that it would find to be others in autocast."""


class WholeOnly(CaptureListener):
    """Hears of the capture of one whole call, and stops it where that is not to be had."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.sparse: tuple[str, Any] | None = None  # the first break at a sparse tensor, which Dynamo refuses
        self._here = threading.local()

    def stop(self, reason: type[NotWhole]) -> None:
        """Hear from the backend that the graph that it was given is not to run, and why."""
        self._here.stopped = reason

    def begins(self, code: types.CodeType) -> None:
        """Hear that a capture begins."""
        self._here.stopped = None

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Stop before anything runs where the call is not one graph."""
        if code is self.code and (self._here.stopped or not whole):
            raise (self._here.stopped or NotWhole)(self)

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Stop before anything runs where the call cannot be traced as a whole."""
        if code is self.code:
            raise NotWhole(self)
        return False

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Leave it to the capture in pieces to say what is skipped."""

    def broke(self, reason: str, stack: Any) -> None:
        """Leave it to the capture in pieces to say where it breaks; remember what pieces cannot be made of."""
        if self.sparse is None and SPARSE.search(reason):
            self.sparse = reason, stack


class InPieces(CaptureListener):
    """Hears of the capture of a call in pieces, tells it to ``heard``, and stops at calls nobody expects."""

    def __init__(self, code: types.CodeType, heard: Any) -> None:
        self.code, self.heard = code, heard
        self._here = threading.local()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Let calls of this thread be captured anew."""
        before = getattr(self._here, "expected", False)
        self._here.expected = True
        try:
            yield
        finally:
            self._here.expected = before

    def begins(self, code: types.CodeType) -> None:
        """Stop before anything runs where this call was not tried as a whole."""
        if code is self.code and not getattr(self._here, "expected", False):
            raise NotKnown(self)

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Take pieces as they come."""

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Let what cannot be traced run as it was written: its own errors arrive from there."""
        return bool(self.heard.failed(code, error))

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Hear from Dynamo that a frame runs as it was written."""
        self.heard.skipped(code, reason)

    def broke(self, reason: str, stack: Any) -> None:
        """Hear from Dynamo that a graph ended before its frame did."""
        self.heard.broke(reason, stack)


class Escaping:
    """Runs calls as one graph where that can be captured, else in pieces with autocast around them.

    ``whole`` and ``pieces`` are captures of the same forward. Dynamo guards the state of autocast, so the second has
    code of its own, captured and run under autocast always; a call goes there once ``whole`` was tried for it, or at
    once where calls ``asks_dtypes``: code that reads ``x.dtype`` finds there what autocast would give it.
    """

    def __init__(
        self,
        whole: tuple[Runner, WholeOnly],
        pieces: tuple[Runner, InPieces],
        region: Callable[[], AbstractContextManager[tuple[str, torch.dtype]]],
        finish: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        attempt: Callable[[Runner, tuple[Any, ...], dict[str, Any]], Any],
        asks_dtypes: bool,
    ) -> None:
        self.whole, self.one = whole
        self.pieces, self.many = pieces
        self.region, self.finish, self.attempt = region, finish, attempt
        self.asks_dtypes = asks_dtypes  # whether no call is tried as a whole
        self.broken = False  # whether any call ran in pieces
        self.retries = 1  # a first call may break for what it sets up once, as transformers' hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        if self.asks_dtypes:
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
            self.asks_dtypes = isinstance(stopped, AsksDtypes)
            self.broken = not self.asks_dtypes
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
    """Run under autocast, with none of the casts of weights that an outer region of the user's may have kept."""
    torch.clear_autocast_cache()
    try:
        with torch.autocast(kind, dtype=dtype):
            yield kind, dtype
    finally:
        torch.clear_autocast_cache()


def is_of_precision(error: Exception) -> bool:
    """Say whether ``error`` is of two precisions that meet, or of an operation that has no kernel for one of them."""
    return not isinstance(error, torch._dynamo.exc.TorchDynamoException) and bool(MIXED.search(str(error)))


def explain(error: Exception, kind: str, dtype: torch.dtype) -> None:
    """Say beside an error of two precisions meeting where the second comes from."""
    if not is_of_precision(error):
        return
    text = HINT.format(kind=kind, dtype=dtype)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    else:
        warn(text)


def without_autocast(run: Runner, kind: str) -> Runner:
    """Return ``run``, for callers under autocast for devices of ``kind``, with autocast off inside."""
    switch = torch.set_autocast_enabled

    def call(*args: Any) -> Any:
        switch(kind, False)
        try:
            return run(*args)
        finally:
            switch(kind, True)

    return call
