"""Input and output types of every planner.

Before: a graph, its nodes' classes and an accuracy. After: ``Problem``, for which a planner returns
``{node: Choice}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass, OpList
from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.precision.classify import Classification

LOW, FULL, AS_CAPTURED = "low", "full", "captured"
FREE = (OpClass.FOLLOW, OpClass.NEUTRAL, OpClass.FP32_INSIDE)


@dataclass(frozen=True)
class Problem:
    """The input of a planner: the graph, each node's class, its memory, the lists and the accuracy.

    ``accuracy``: "autocast", "fast", or a number. With a number, any free operation may be low, but for ``unbounded``
    ones: nothing is known of the effect of rounding their operands.
    """

    gm: GraphModule
    classes: Mapping[Node, Classification]
    memory: Memory
    lists: OpList
    accuracy: str | float
    keep_outputs: bool = True
    unbounded: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class Choice:
    """The output of a planner for one node.

    ``precision``: the precision the node computes in, "low", "full" or "captured" (unchanged).
    ``wants``: the precision of each input that must have a certain one; other inputs need no cast.
    ``converts_result``: the result is cast to full precision at once, for all its readers.
    ``asks_dtype``: the call gets ``dtype=torch.float32``.
    """

    precision: str
    reason: str
    wants: Mapping[Node, str] = field(default_factory=dict)
    converts_result: bool = False
    asks_dtype: bool = False
