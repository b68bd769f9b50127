"""The records of a report: one captured graph and its rewriting, in strings and numbers.

``GraphReport(index=0, nodes=(NodeReport(name="linear", precision="low", ...), ...), casts=(...), ...)``
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_graph.passes.base import Change
from amp_graph.passes.graph.graph_text import CapturedNode
from amp_graph.passes.precision.error_budget_planner import Budget

WEIGHT, ACTIVATION = "weight", "activation"
CALLS = ("operation", "cast", "part")  # kinds of nodes that call something


@dataclass(frozen=True)
class NodeReport(CapturedNode):
    """One node of a rewritten graph: what it calls, the precision it computes in, and why.

    ``ops``: its ATen operations. ``cls`` is the class that its list gives it, "cast" for an inserted cast, "" for what
    is not planned. ``precision``: "low", "full" or "captured"; "" for an input. ``bytes``: what the node writes, 0 for
    a view; an input's size. ``flops``: of its matrix products in forward, two to a multiply-add, 0 for any other
    operation. Of a cast: ``source``, the name of what it casts; ``of``: "weight" or "activation"; ``to``: its dtype;
    ``kept``: whether a frozen model keeps its result. ``key``: a planned operation's, as ``keep_ops`` takes it.
    """

    ops: tuple[str, ...]
    cls: str
    precision: str
    reason: str
    origin: str
    line: str
    captured_type: str
    listed: bool
    bytes: int
    flops: int
    key: str = ""
    source: str = ""
    of: str = ""
    to: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Predicted:
    """The predicted speed of a graph, forward and backward, as a multiple of full precision's, on a ``machine``.

    Above 1 is faster. ``left_alone``: whether the graph stays in full precision as ``speed`` is too low. ``full``: full
    precision's predicted seconds. ``autocast``: the speed of the plan that follows torch.autocast's rules; 0: unknown.
    ``why_low``: why the graph is low although the policy leaves graphs that are predicted to lose.
    """

    speed: float
    machine: str
    left_alone: bool = False
    full: float = 0.0
    autocast: float = 0.0
    why_low: str = ""


@dataclass(frozen=True)
class Collective:
    """What a unit of ``fully_shard`` sends in one collective.

    ``direction``: "gather" of parameters, "reduce" of gradients to shards, or "sum" of what is no shard. ``dtype``:
    "bf16 and f32" where a gather has both. ``bytes``: of the whole that is gathered, reduced or summed. ``times``: in a
    step of forward and backward. ``reason``: of its dtypes.
    """

    unit: str
    direction: str
    dtype: str
    bytes: int
    times: int
    reason: str


@dataclass(frozen=True)
class GraphReport:
    """One captured graph: its text before, its nodes after, what the passes did, and why it ended.

    ``training`` is None where it is not known. ``symbolic``: whether its inputs have symbolic sizes. ``bytes``
    estimates the activations that the graph writes, by dtype; ``captured_bytes``: as captured; ``spared_bytes``: those
    that backward recomputes instead of saving. ``changes``: what the passes did, except the plan, which is in the
    nodes. ``budget``: the predicted error of its plan, if the policy has an error budget. ``predicted``: its predicted
    speed by a machine's rates (``amp-graph calibrate``); None without low precision. ``left_out``: the passes that
    failed on this graph and were skipped; ``unplanned``: why and how it runs without a plan, if it does.
    """

    index: int
    training: bool | None
    grad: bool
    symbolic: bool
    device: str
    dtype: str
    before: str
    nodes: tuple[NodeReport, ...]
    captured: tuple[CapturedNode, ...]
    changes: tuple[Change, ...]
    skips: tuple[Change, ...]
    break_reason: str
    break_line: str
    bytes: dict[str, int]
    captured_bytes: int
    has_fp32: bool
    has_floats: bool
    budget: Budget | None = None
    predicted: Predicted | None = None
    spared_bytes: int = 0
    left_out: tuple[Change, ...] = ()
    unplanned: str = ""

    @property
    def mode(self) -> str:
        """How the graph was captured: ``train, with gradients``."""
        mode = "" if self.training is None else "train, " if self.training else "eval, "
        return f"{mode}{'with' if self.grad else 'without'} gradients"

    @property
    def title(self) -> str:
        """A heading: ``graph 0: train, with gradients, bf16``."""
        return f"graph {self.index}: {self.mode}, {self.dtype}{', symbolic sizes' * self.symbolic}"

    @property
    def operations(self) -> tuple[NodeReport, ...]:
        """The planned operations: all nodes except inputs, casts and plumbing."""
        return tuple(n for n in self.nodes if n.cls not in ("cast", ""))

    @property
    def casts(self) -> tuple[NodeReport, ...]:
        """The inserted casts."""
        return tuple(n for n in self.nodes if n.kind == "cast")

    @property
    def removed(self) -> tuple[Change, ...]:
        """The casts that passes removed."""
        return tuple(note for note in self.changes if note.action == "removed")

    @property
    def text(self) -> str:
        """The rewritten graph as text, a line for each node, followed by its subgraphs."""
        return "\n".join(line for line, _ in self.lines())

    def lines(self) -> list[tuple[str, NodeReport | None]]:
        """Return the lines of the text, each with its node; None for the title of a subgraph."""
        lines: list[tuple[str, NodeReport | None]] = []
        path = ""
        for node in self.nodes:
            if node.path != path:
                path = node.path
                lines += [("", None), (f"subgraph {path.rstrip('/')}:", None)]
            lines.append(("  " * bool(path) + node.text, node))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return dataclasses.asdict(self) | {"mode": self.mode}
