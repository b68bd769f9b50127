"""What Dynamo did not capture of a model, in the user's lines.

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

from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener

TORCH = os.path.dirname(torch.__file__)
STDLIB = os.path.dirname(os.__file__)
HERE = os.path.dirname(os.path.dirname(__file__))


@dataclass
class Place:
    """A place in the user's code where capture stopped, or that was not captured at all."""

    where: str
    reason: str


class CaptureLog(CaptureListener):
    """Hears from Dynamo what it leaves out of a model's graphs: ``skips`` as a whole, ``breaks`` within a frame."""

    def __init__(self) -> None:
        self.skips: list[Place] = []
        self.breaks: list[Place] = []
        self.events = 0  # since somebody last looked which parameters are read

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Let what cannot be traced run as it was written: its own errors arrive from there."""
        self.skipped(code, f"tracing failed, an error was suppressed: {type(error).__name__}: {first_line(error)}")
        return True

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Hear from Dynamo that a frame runs as it was written; torch's own frames are not worth a line."""
        of_module = code.co_name == "forward" and code.co_filename.startswith(os.path.join(TORCH, "nn", "modules"))
        self.events += of_module or "suppressed" in reason
        if reason and not code.co_filename.startswith((TORCH, STDLIB, HERE, "<")):
            self.skips.append(Place(f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}", reason))

    def broke(self, reason: str, stack: Any) -> None:
        """Hear from Dynamo that a graph ended before its frame did."""
        self.events += 1
        self.breaks.append(break_at(reason, stack))

    def causes(self) -> str:
        """Return the last few of them, each once, a line in all."""
        found = dict.fromkeys(f"{s.where}: {first_line(s.reason)}".strip(": ") for s in (*self.breaks, *self.skips))
        return "; ".join(list(found)[-3:])


def break_at(reason: str, stack: Any) -> Place:
    """Return the user's line of a graph break, and what Dynamo says of it: the problem, and its explanation."""
    explained = re.search(r"Explanation: (.*)", reason)
    told = first_line(reason) + (f": {explained.group(1).strip()}" if explained else "")
    own = [s for s in stack or () if not s.filename.startswith((HERE, TORCH))]
    return Place(f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else "", told)


def first_line(error: Any) -> str:
    """Return the first line of what ``error`` says."""
    return (str(error).strip().splitlines() or [""])[0]
