"""Records which source lines of a model Dynamo did not capture, and why.

Before: a frame that is skipped, a graph that ends at a ``print``. After: ``Place("model.py:80, in forward: ...",
why)``.
"""

from __future__ import annotations

import os
import re
import types
from dataclasses import dataclass
from typing import Any

import torch

from amp_graph.lists.errors import first_line
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener

TORCH = os.path.dirname(torch.__file__)
STDLIB = os.path.dirname(os.__file__)
MIXED = re.compile(r"dtype|scalar type|Half|BFloat16")  # errors of operands of two dtypes
TRACE = "\nfrom user code:"  # Dynamo appends the lines on the way to an error, which may well say "dtype"
HERE = os.path.dirname(os.path.dirname(__file__))


class TwoDtypes(Exception):
    """A call cannot be traced as an operation has operands of two dtypes; raised before any part of it has run."""


@dataclass
class Place:
    """A place in the user's code where capture stopped, or that was not captured at all."""

    where: str
    reason: str


class CaptureLog(CaptureListener):
    """Receives Dynamo's events: ``skips`` are whole frames that it did not capture, ``breaks`` are graph breaks."""

    def __init__(self) -> None:
        self.skips: list[Place] = []
        self.breaks: list[Place] = []
        self.events = 0  # since the unread parameters were last checked

    def failed(self, code: types.CodeType, error: Exception, *, whole: bool) -> bool:
        """Record a failed trace; the code runs uncaptured and raises its own errors.

        Raises TwoDtypes if nothing of a call has run yet, and autocast may run it.
        """
        if whole and MIXED.search(str(error).partition(TRACE)[0]):
            raise TwoDtypes from error
        self.skipped(code, f"tracing failed, an error was suppressed: {type(error).__name__}: {first_line(error)}")
        return True

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Record a frame that Dynamo skipped; torch's own frames are left out of the log."""
        of_module = code.co_name == "forward" and code.co_filename.startswith(os.path.join(TORCH, "nn", "modules"))
        self.events += of_module or "suppressed" in reason
        if reason and not code.co_filename.startswith((TORCH, STDLIB, HERE, "<")):
            self.skips.append(Place(f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}", reason))

    def broke(self, reason: str, stack: Any) -> None:
        """Record a graph break."""
        self.events += 1
        self.breaks.append(break_at(reason, stack))

    def causes(self) -> str:
        """Return the last few distinct causes, in one line."""
        found = dict.fromkeys(f"{s.where}: {first_line(s.reason)}".strip(": ") for s in (*self.breaks, *self.skips))
        return "; ".join(list(found)[-3:])


def break_at(reason: str, stack: Any) -> Place:
    """Return the user's line of a graph break, and Dynamo's description and explanation of it."""
    explained = re.search(r"Explanation: (.*)", reason)
    told = first_line(reason) + (f": {explained.group(1).strip()}" if explained else "")
    own = [s for s in stack or () if not s.filename.startswith((HERE, TORCH))]
    return Place(f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else "", told)
