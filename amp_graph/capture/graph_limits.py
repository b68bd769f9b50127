"""What a converted model does with calls for which it has no graph, once captures have come to an end.

Before: ``model(x, n)`` for the seventeenth ``n``. After: the call runs as code that escapes capture, and a warning says
that calls differ in ``n``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.graph_break_policy import EscapedCode
from amp_graph.capture.recapture_limits import Bare, Budget, NoGraph, Variants
from amp_graph.capture.recapture_reasons import called


@dataclass(eq=False)
class GraphLimits:
    """How many graphs of ``model`` are captured: of ``whole`` calls, and of ``pieces``, of which each is counted."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    own: str  # the name of the function that is captured
    most: int
    symbols: bool  # whether numbers may become symbols
    budget: Budget
    escaped: EscapedCode
    said: Complaints

    def __post_init__(self) -> None:
        """Begin without captures."""
        how = (self.own, self.most, self.symbols, self.budget)
        of = called(self.forward)
        self.whole, self.pieces, self._bare = Variants(*how, of=of), Variants(*how, of=of), Bare()

    def passes(self) -> bool:
        """Say whether a call runs without a look for its graph."""
        if not self._bare.passes(self.model.training):
            return False
        self.budget.calls += 1
        return True

    def has_none(self, stopped: NoGraph) -> bool:
        """Say whether it was here that a call ``stopped``, for which nothing is captured, and warn of what varies."""
        if stopped.owner is not self.whole and stopped.owner is not self.pieces:
            return False
        self.budget.calls += 1
        self._bare.missed(self.model.training)
        self._say_what_varies()
        return True

    def ran(self) -> None:
        """Take note of a call that ran on what was captured, or on what was captured of it."""
        self.budget.calls += 1
        self._bare.hit(self.model.training)
        if self.whole.why is not None or self.pieces.why is not None:
            self._say_what_varies()

    def _say_what_varies(self) -> None:
        """Say, once, which calls are captured no more, as they go on to differ in what was constant in each graph."""
        why = self.whole.why or self.pieces.why
        assert why is not None, "asked for where captures have ended"
        rarely = "" if why.captures >= self.most else ", and further ones are captured ever more rarely"
        self.said.complain(
            f"captured {why.captures} times, and calls still differ: those without a graph run {self.escaped.how} from "
            f"now on{rarely}",
            f"they differ in {why}\n  fix:   {why.fix}; max_graphs={self.most} is how many graphs are kept",
        )
