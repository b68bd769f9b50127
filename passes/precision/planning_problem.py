"""What there is to plan in a graph, and what is answered for a node: the same for every planner.

Before: a graph, its nodes' classes and an accuracy. After: ``Problem``, to which a planner answers ``{node: Choice}``.
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
    """What a planner is given: the graph, each node's class, its memory, the lists and the accuracy.

    ``accuracy``: "autocast", "fast", or a number, with which any free operation may be low.
    """

    gm: GraphModule
    classes: Mapping[Node, Classification]
    memory: Memory
    lists: OpList
    accuracy: str | float
    keep_outputs: bool = True


@dataclass(frozen=True)
class Choice:
    """What a planner answers for a node; see ``plan_precision.Mark``."""

    precision: str
    reason: str
    wants: Mapping[Node, str] = field(default_factory=dict)
    converts_result: bool = False
    asks_dtype: bool = False
