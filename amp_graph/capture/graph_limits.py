"""Limits the captures of a converted model, and runs further calls without a graph.

Before: ``model(x, n)`` for the seventeenth ``n``. After: the call runs as uncaptured code, and a warning says that
calls differ in ``n``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.recapture_limits import Bare, Budget, NoGraph, Variants
from amp_graph.capture.recapture_reasons import called


@dataclass(eq=False)
class GraphLimits:
    """The capture limits of ``model``: ``variants`` counts the graphs of each place."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    own: str  # the name of the function that is captured
    most: int
    symbols: bool  # whether numbers may become symbols
    budget: Budget
    said: Complaints
    how: Callable[[], str]  # such calls run, in words

    def __post_init__(self) -> None:
        """Start with no captures."""
        self.variants = Variants(self.own, self.most, self.symbols, self.budget, of=called(self.forward))
        self._bare = Bare()
        self.has_pauses = self._bare.pauses.__len__  # whether ``passes`` has to be asked, in one C call

    def passes(self) -> bool:
        """Return whether a call runs without checking guards."""
        if not self._bare.passes(self.model.training):
            return False
        self.budget.calls += 1
        return True

    def has_none(self, stopped: NoGraph) -> bool:
        """Return whether these limits ``stopped`` the call; if so, warn about what varies between calls."""
        if stopped.owner is not self.variants:
            return False
        self.budget.calls += 1
        self._bare.missed(self.model.training)
        self._say_what_varies()
        return True

    def ran(self) -> None:
        """Record a call that ran on captured graphs, at least in part."""
        self.budget.calls += 1
        if self._bare.pauses:
            self._bare.hit(self.model.training)
        if self.variants.why is not None:
            self._say_what_varies()

    def _say_what_varies(self) -> None:
        """Report once that captures have stopped, and which value, constant in each graph, keeps changing."""
        why = self.variants.why
        assert why is not None, "only called after captures have stopped"
        rarely = "" if why.captures >= self.most else ", and new captures get ever rarer"
        bare = f"calls without a graph run {self.how()}" if self.variants.whole else "code without a graph runs in fp32"
        self.said.complain(
            f"captured {why.captures} times, and calls still differ: {bare} from now on{rarely}",
            f"they differ in {why}\n  fix:   {why.fix}; max_graphs={self.most} limits the graphs that are kept",
        )
