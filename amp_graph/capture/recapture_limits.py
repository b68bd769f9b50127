"""Limits recaptures of the same code, whose calls differ in values that capture treats as constants.

Before: ``self.calls += 1`` in a forward, a new graph for each number. After: the number is a symbol from the third
capture on; if it cannot be one, captures stop at ``max_graphs``, and a warning names it: "self.calls (model.py:7, in
forward: self.calls += 1)". Graphs are counted, never seconds, so that the same program always runs the same graphs.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.capture.diagnostics import break_at
from amp_graph.capture.name_nodes import user_name
from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, failed_guards, is_remembered
from amp_graph.passes.torch_compat.dynamo_settings import CHANGING_INTS

MOST = 16  # graphs per code object
STATIC = 2  # captures that treat integer attributes of modules as constants
LONGEST = 80  # characters of a name that are shown
FIX = "use few values of it, or pass it as a tensor if it is only used in arithmetic"


class NoGraph(Exception):
    """A call has no graph, and none is captured for it; raised before any part of it has run."""

    def __init__(self, owner: object) -> None:
        super().__init__("amp_graph: no further graph is captured")
        self.owner = owner


def check_max_graphs(caller: str, count: Any) -> None:
    """Raise CaptureError unless ``count`` is a positive integer."""
    if type(count) is not int or count < 1:
        raise CaptureError(
            f"{caller}: max_graphs={count!r}\n  legal: a whole number, 1 or more\n  fix:   max_graphs={MOST}"
        )


def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of ``forward``."""
    try:
        return tuple(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # it has no code object
        return ()


@dataclass(eq=False)
class Variants(CaptureListener):
    """Decides which frames of one capture are captured again; ``own``: the name of the captured function.

    symbols: whether integer attributes of modules may become symbols. Without a capture, an inner frame runs
    uncaptured; for the whole call NoGraph is raised.
    """

    own: str
    most: int
    symbols: bool
    names: Sequence[str] = ()  # of the arguments of the captured function
    captures: Counter[tuple[Any, ...]] = field(default_factory=Counter)  # graphs, by place
    why: str = ""  # the varying value that stopped captures
    whole: bool = False  # whether they stopped for whole calls, not for the code after a graph break

    def settings(self, frame: Any) -> dict[str, Any] | None:
        """Return Dynamo's settings for a capture of ``frame``; at the limit, return None or raise NoGraph."""
        if self.captures and self._is_own(frame) and not is_remembered(frame.f_code):
            self.captures.clear()  # Dynamo has dropped them
        count = self.captures[self._place(frame)]
        if count >= self.most:
            if not self.why:
                self.why, self.whole = changed_value(failed_guards(frame), self.names), self._is_own(frame)
            if self._is_own(frame):
                raise NoGraph(self)
            return None
        return CHANGING_INTS if self.symbols and count >= STATIC else {}

    @property
    def is_full(self) -> bool:
        """Whether the limit of graphs is reached."""
        return sum(count for place, count in self.captures.items() if place[0] == self.own) >= self.most

    def made(self, frame: Any) -> None:
        """Count a capture."""
        self.captures[self._place(frame)] += 1

    def _is_own(self, frame: Any) -> bool:
        return bool(re.fullmatch(rf"{self.own}_\d+", frame.f_code.co_name))

    def _place(self, frame: Any) -> tuple[Any, ...]:
        """Return a key for the code of ``frame``: its lines, and the module whose method it is.

        Not the code object: a new capture replaces it.
        """
        code, module = frame.f_code, frame.f_locals.get("self")
        name = self.own if self._is_own(frame) else code.co_name
        of = id(module) if isinstance(module, torch.nn.Module) else None
        return name, code.co_filename, code.co_firstlineno, of


def changed_value(guards: Sequence[tuple[str, Any]], names: Sequence[str]) -> str:
    """Return the most frequent cause among failed ``guards``, one per graph, given with their stacks."""
    read = [(user_name(re.split(r" #| == ", guard)[0].strip(), names)[:LONGEST], stack) for guard, stack in guards]
    if not read:
        return "a value that no guard names: see TORCH_LOGS=recompiles"
    what = Counter(what for what, _ in read).most_common(1)[0][0]
    where = break_at("", dict(read)[what]).where
    return f"{what} ({where})" if where else what
