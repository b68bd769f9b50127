"""How many graphs are kept of the same code, whose calls differ in what its capture took for constant.

Before: ``self.calls += 1`` in a forward, a new graph for each number. After: the number is a symbol from the third
capture on; where it cannot be one, captures end, and calls without a graph run as under ``torch.autocast``.

A capture takes a hundred or a thousand times as long as a call, so the first few are free, and more are made while
their graphs are small, or where calls since the last have earned another. What is counted is graphs, their nodes, and
calls, never seconds: the same program always runs the same graphs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.capture.recapture_reasons import Called, Varied, varied_by
from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.dynamo_capture import CaptureChoice, failed_guards, is_remembered
from amp_graph.passes.torch_compat.dynamo_settings import CHANGING_INTS

MOST = 16  # graphs of the same code
STATIC = 2
FREE = 4  # captures whatever they take: train, eval, with and without gradients
NODES = 500  # of the captures beyond those, before calls have to earn another: some 10 ms each
EARNS = 64  # calls, for the first capture that is earned; twice as many for the next
PAUSE = 16  # the most calls in a row for which guards are not asked, where calls before had no graph


class NoGraph(Exception):
    """A call has no graph, and none is captured for it; raised before any of it has run."""

    def __init__(self, owner: object) -> None:
        super().__init__("amp_graph: no further graph is captured")
        self.owner = owner


def check_max_graphs(caller: str, count: Any) -> None:
    """Raise CaptureError for a number of graphs that makes no sense."""
    if type(count) is not int or count < 1:
        raise CaptureError(
            f"{caller}: max_graphs={count!r}\n  legal: a whole number, 1 or more\n  fix:   max_graphs={MOST}"
        )


@dataclass
class Budget:
    """What the captures of one model may take: counted in nodes, earned by calls."""

    nodes: int = 0  # of all captures so far
    beyond: int = 0  # nodes of the captures beyond the free ones
    calls: int = 0  # since the last capture
    earns: int = EARNS

    def allows(self) -> bool:
        """Say whether another capture is affordable."""
        return self.beyond <= NODES or self.calls >= self.earns

    def spend(self, nodes: int) -> None:
        """Take note of a capture beyond the free ones."""
        self.earns *= 2 if self.beyond > NODES else 1
        self.beyond += nodes
        self.calls = 0


@dataclass
class Bare:
    """The calls that found no graph, after captures have ended: guards are asked for the fewer the more there are.

    Guards of 16 graphs take some time of a small model's call. By mode, train or eval: one may have its graphs.
    """

    pauses: dict[tuple[bool, bool], list[int]] = field(default_factory=dict)  # [calls to pass, length of the pause]

    def passes(self, training: bool) -> bool:
        """Say whether this call runs without a look for its graph."""
        if not self.pauses:
            return False
        pause = self.pauses.get((training, torch.is_grad_enabled()))
        if pause is None or not pause[0]:
            return False
        pause[0] -= 1
        return True

    def missed(self, training: bool) -> None:
        """Take note that a look found nothing."""
        pause = self.pauses.setdefault((training, torch.is_grad_enabled()), [0, 0])
        pause[1] = min(2 * pause[1] + 1, PAUSE)
        pause[0] = pause[1]

    def hit(self, training: bool) -> None:
        """Take note that a call has run on a graph."""
        if self.pauses:
            self.pauses.pop((training, torch.is_grad_enabled()), None)


@dataclass(eq=False)
class Variants(CaptureChoice):
    """Chooses which frames of one capture are captured again; ``own``: the name of the function that was captured.

    symbols: whether integers of modules may become symbols. A frame in the midst of a call runs as it was written where
    no graph is captured for it; for the call as a whole, NoGraph is raised.
    """

    own: str
    most: int
    symbols: bool
    budget: Budget
    static: int = STATIC  # captures that take integers of modules for constants
    of: Called = field(default_factory=Called)  # what messages speak of
    captures: Counter[tuple[Any, ...]] = field(default_factory=Counter)  # by place
    _before: int = 0  # nodes captured before the capture that is going on
    why: Varied | None = None  # what the calls differ in for which nothing is captured any more

    def settings(self, frame: Any) -> dict[str, Any] | None:
        """Return Dynamo's settings for a capture of ``frame``; None, or NoGraph, where there were enough."""
        if self.captures and self._is_own(frame) and not is_remembered(frame.f_code):
            self.forget()
        count = self.captures[self._place(frame)]
        if count >= self.most or (count >= min(FREE, self.most) and not self.budget.allows()):
            if self.why is None:
                self.why = varied_by(failed_guards(frame), frame, self.of, count)
            if self._is_own(frame):
                raise NoGraph(self)
            return None
        self._before = self.budget.nodes  # captures are made one at a time
        return CHANGING_INTS if self.symbols and count >= self.static else {}

    @property
    def is_full(self) -> bool:
        """Whether no further graph of what is captured is made."""
        return sum(count for place, count in self.captures.items() if place[0] == self.own) >= self.most

    def made(self, frame: Any) -> None:
        """Count what was captured."""
        place = self._place(frame)
        self.captures[place] += 1
        if self.captures[place] > FREE:
            self.budget.spend(self.budget.nodes - self._before)

    def forget(self) -> None:
        """Take note that Dynamo has let go of all that was captured."""
        self.captures.clear()

    def _is_own(self, frame: Any) -> bool:
        return bool(re.fullmatch(rf"{self.own}_\d+", frame.f_code.co_name))

    def _place(self, frame: Any) -> tuple[Any, ...]:
        """Return what names the code of ``frame``: its lines, and the module whose method it is.

        Not the code object, to which what was captured is tied, and which a capture anew replaces.
        """
        code, module = frame.f_code, frame.f_locals.get("self")
        name = self.own if self._is_own(frame) else code.co_name
        of = id(module) if isinstance(module, torch.nn.Module) else None
        return name, code.co_filename, code.co_firstlineno, of
