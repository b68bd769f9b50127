"""The records of a report: one captured graph and its rewriting, in strings and numbers.

``GraphReport(index=0, nodes=(NodeReport(name="linear", precision="low", ...), ...), casts=(...), ...)``
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_graph.passes.autocast_regions.casts_under_autocast import CastsUnderAutocast
from amp_graph.passes.precision.error_budget_planner import Budget

WEIGHT, ACTIVATION = "weight", "activation"


@dataclass(frozen=True)
class NodeReport:
    """One operation: what it calls, the precision it computes in, and why.

    ``name`` is the node's name and ``number`` its place in the graph's text (``%7``), both after the path of
    their subgraph; ``cls`` is the class that its list gives it, or "cast" for an inserted cast.
    """

    name: str
    number: str
    ops: tuple[str, ...]
    module: str
    cls: str
    precision: str
    reason: str
    origin: str
    line: str
    type: str
    captured_type: str
    listed: bool


@dataclass(frozen=True)
class CastReport:
    """One inserted cast: its kind of value ("weight" or "activation"), its dtype, and its reader.

    ``kept``: its result is in the weight cache, until something writes to the weight.
    """

    name: str
    number: str
    source: str
    of: str
    to: str
    reason: str
    kept: bool = False


@dataclass(frozen=True)
class Note:
    """A node, and a pass's remark on it: a skip, or a cast that it removed."""

    node: str
    rule: str
    reason: str


@dataclass(frozen=True)
class Predicted:
    """The predicted time of a graph, forward and backward, as a multiple of full precision's, on a ``machine``.

    ``left_alone``: whether the graph stays in full precision for that reason. ``full``: full precision's predicted
    seconds. ``autocast``: the predicted time of the plan that follows torch.autocast's rules, as a multiple of that.
    ``why_low``: why the graph is low although the policy leaves graphs that are predicted to lose.
    """

    ratio: float
    machine: str
    left_alone: bool = False
    full: float = 0.0
    autocast: float = 0.0
    why_low: str = ""


@dataclass(frozen=True)
class GraphReport:
    """One captured graph: its text before and after, its operations, its casts, and why it ended.

    ``training`` is None where it is not known. ``bytes`` estimates the activations that the graph writes, by dtype;
    ``captured_bytes``: as captured;
    ``spared_bytes``: those that backward recomputes instead of saving. ``budget``: the predicted error of its plan, if
    the policy has an error budget. ``predicted``: its predicted time by a machine's rates (``amp-graph calibrate``);
    None without low precision. ``left_out``: the passes that failed on this graph and were skipped; ``unplanned``: why
    and how it runs without a plan, if it does. ``autocast``: the casts that ``torch.autocast`` makes in a call of the
    graph as captured, or why they were not counted; None at level O0.
    """

    index: int
    training: bool | None
    grad: bool
    dtype: str
    before: str
    text: str
    nodes: tuple[NodeReport, ...]
    casts: tuple[CastReport, ...]
    removed: tuple[Note, ...]
    skips: tuple[Note, ...]
    break_reason: str
    break_line: str
    bytes: dict[str, int]
    captured_bytes: int
    has_fp32: bool
    has_floats: bool
    budget: Budget | None = None
    predicted: Predicted | None = None
    spared_bytes: int = 0
    left_out: tuple[Note, ...] = ()
    unplanned: str = ""
    autocast: CastsUnderAutocast | None = None

    @property
    def mode(self) -> str:
        """How the graph was captured: ``train, with gradients``."""
        mode = "" if self.training is None else "train, " if self.training else "eval, "
        return f"{mode}{'with' if self.grad else 'without'} gradients"

    @property
    def operations(self) -> tuple[NodeReport, ...]:
        """The planned operations: all nodes except casts and plumbing."""
        return tuple(n for n in self.nodes if n.cls not in ("cast", ""))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return dataclasses.asdict(self)
