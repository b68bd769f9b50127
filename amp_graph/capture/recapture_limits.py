"""Limits recaptures of the same code, whose calls differ in values that capture treats as constants.

Before: ``self.calls += 1`` in a forward, a new graph for each number. After: the number is a symbol from the third
capture on; if it cannot be one, captures stop, and calls without a graph run under ``torch.autocast``, pieces in fp32.

A capture takes 100 to 1000 times as long as a call. The first few are free. More are made while their graphs are
small, or after enough calls since the last one. The limits count graphs, nodes and calls, never seconds, so that the
same program always runs the same graphs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.capture.diagnostics import Diagnostics
from amp_graph.capture.recapture_reasons import CallSite, ChangedValue, call_site, changed_value
from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.dynamo_capture import CaptureChoice, failed_guards, is_remembered
from amp_graph.passes.torch_compat.dynamo_settings import CHANGING_INTS

MOST = 16  # graphs per code object
STATIC = 2
FREE = 4  # captures that are free: train, eval, with and without gradients
NODES = 500  # of further captures before calls must earn another: some 10 ms each
EARNS = 64  # calls that earn the first further capture; the next takes twice as many
PAUSE = 16  # the most calls in a row without a guard check, after calls without a graph


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


@dataclass
class Budget:
    """The capture budget of one model: counted in nodes, earned by calls."""

    nodes: int = 0  # of all captures so far
    beyond: int = 0  # nodes of the captures beyond the free ones
    calls: int = 0  # since the last capture
    earns: int = EARNS

    def allows(self) -> bool:
        """Return whether another capture is within the budget."""
        return self.beyond <= NODES or self.calls >= self.earns

    def spend(self, nodes: int) -> None:
        """Charge a capture beyond the free ones."""
        self.earns *= 2 if self.beyond > NODES else 1
        self.beyond += nodes
        self.calls = 0


@dataclass
class Backoff:
    """Calls without a graph after captures have stopped: the more there are, the more rarely guards are checked.

    The guards of 16 graphs take a noticeable part of a small model's call. Counted per mode, train or eval.
    """

    pauses: dict[tuple[bool, bool], list[int]] = field(default_factory=dict)  # [calls until a check, length of pause]

    def passes(self, training: bool) -> bool:
        """Return whether this call runs without a guard check."""
        if not self.pauses:
            return False
        pause = self.pauses.get((training, torch.is_grad_enabled()))
        if pause is None or not pause[0]:
            return False
        pause[0] -= 1
        return True

    def missed(self, training: bool) -> None:
        """Record that no guard held."""
        pause = self.pauses.setdefault((training, torch.is_grad_enabled()), [0, 0])
        pause[1] = min(2 * pause[1] + 1, PAUSE)
        pause[0] = pause[1]

    def hit(self, training: bool) -> None:
        """Record that a call ran on a graph."""
        if self.pauses:
            self.pauses.pop((training, torch.is_grad_enabled()), None)


@dataclass(eq=False)
class Variants(CaptureChoice):
    """Decides which frames of one capture are captured again; ``own``: the name of the captured function.

    symbols: whether integer attributes of modules may become symbols. Without a capture, an inner frame runs
    uncaptured; for the whole call NoGraph is raised.
    """

    own: str
    most: int
    symbols: bool
    budget: Budget
    static: int = STATIC  # captures that treat integer attributes of modules as constants
    of: CallSite = field(default_factory=CallSite)  # the function named in messages
    captures: Counter[tuple[Any, ...]] = field(default_factory=Counter)  # graphs, by place
    _before: int = 0  # nodes captured before the current capture
    why: ChangedValue | None = None  # the varying value that stopped captures
    whole: bool = False  # whether they stopped for whole calls, not for the code after a graph break

    def settings(self, frame: Any) -> dict[str, Any] | None:
        """Return Dynamo's settings for a capture of ``frame``; at the limit, return None or raise NoGraph."""
        if self.captures and self._is_own(frame) and not is_remembered(frame.f_code):
            self.forget()
        count = self.captures[self._place(frame)]
        if count >= self.most or (count >= min(FREE, self.most) and not self.budget.allows()):
            if self.why is None:
                self.why, self.whole = changed_value(failed_guards(frame), frame, self.of, count), self._is_own(frame)
            if self._is_own(frame):
                raise NoGraph(self)
            return None
        self._before = self.budget.nodes  # captures run one at a time
        return CHANGING_INTS if self.symbols and count >= self.static else {}

    @property
    def is_full(self) -> bool:
        """Whether the limit of graphs is reached."""
        return sum(count for place, count in self.captures.items() if place[0] == self.own) >= self.most

    def made(self, frame: Any) -> None:
        """Count a capture."""
        place = self._place(frame)
        self.captures[place] += 1
        if self.captures[place] > FREE:
            self.budget.spend(self.budget.nodes - self._before)

    def forget(self) -> None:
        """Record that Dynamo has dropped all captures."""
        self.captures.clear()

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


@dataclass(eq=False)
class GraphLimits:
    """The capture limits of ``model``: ``variants`` counts the graphs of each place."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    own: str  # the name of the function that is captured
    most: int
    symbols: bool  # whether numbers may become symbols
    budget: Budget
    diagnostics: Diagnostics
    how: Callable[[], str]  # how calls without a graph run, in words

    def __post_init__(self) -> None:
        """Start with no captures."""
        self.variants = Variants(self.own, self.most, self.symbols, self.budget, of=call_site(self.forward))
        self._backoff = Backoff()
        self.has_pauses = self._backoff.pauses.__len__  # whether ``passes`` has to be asked, in one C call

    def passes(self) -> bool:
        """Return whether a call runs without checking guards."""
        if not self._backoff.passes(self.model.training):
            return False
        self.budget.calls += 1
        return True

    def has_none(self, stopped: NoGraph) -> bool:
        """Return whether these limits ``stopped`` the call; if so, warn about what varies between calls."""
        if stopped.owner is not self.variants:
            return False
        self.budget.calls += 1
        self._backoff.missed(self.model.training)
        self._warn_of_what_varies()
        return True

    def ran(self) -> None:
        """Record a call that ran on captured graphs, at least in part."""
        self.budget.calls += 1
        if self._backoff.pauses:
            self._backoff.hit(self.model.training)
        if self.variants.why is not None:
            self._warn_of_what_varies()

    def _warn_of_what_varies(self) -> None:
        """Report once that captures have stopped, and which value, constant in each graph, keeps changing."""
        why = self.variants.why
        assert why is not None, "only called after captures have stopped"
        rarely = "" if why.captures >= self.most else ", and new captures get ever rarer"
        bare = f"calls without a graph run {self.how()}" if self.variants.whole else "code without a graph runs in fp32"
        self.diagnostics.warn(
            f"captured {why.captures} times, and calls still differ: {bare} from now on{rarely}",
            f"they differ in {why}\n  fix:   {why.fix}; max_graphs={self.most} limits the graphs that are kept",
        )
