"""Watches a trace for products that run in another precision than planned.

Before: a rewritten graph whose nodes carry marks, traced with its backward. After: ``Watch.lost``, a record of each.
The products of backward belong to the node whose forward made their part of autograd's graph.
"""

from __future__ import annotations

from typing import Any

from amp_graph.passes.casts.product_precision import Lost, difference, kind_of, planned, ran_in
from amp_graph.passes.graph.activation_checkpoints import run_checkpoint
from amp_graph.passes.graph.observe import Observer, RunningNode
from amp_graph.passes.torch_compat.autograd import running_sequence_number
from amp_graph.passes.torch_compat.dispatch import TorchDispatchMode


class _Inline(RunningNode):
    """Knows which node of the graph a call of the trace belongs to; a checkpoint's recomputation is a part of both."""

    def called(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Run the graph of a checkpoint node by node as well."""
        if target is run_checkpoint:
            return target, (Observer(args[0], self).run, *args[1:]), {**kwargs, "keeps_random_state": False}
        return target, args, kwargs


class Watch(TorchDispatchMode):
    """Sees each operation of a trace; ``nodes``: takes the nodes of the graph, as they run."""

    def __init__(self) -> None:
        """Nothing has run yet."""
        super().__init__()
        self._found: dict[Lost, None] = {}
        self.nodes = _Inline()

    @property
    def lost(self) -> tuple[Lost, ...]:
        """The products that ran in another precision than planned, each once."""
        return tuple(self._found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare one operation with the plan, and run it."""
        kwargs = kwargs or {}
        if kind_of(func):
            number = running_sequence_number()
            node = self.nodes.now(backward=number >= 0)
            if node is not None:
                where = "" if number < 0 else "in backward"
                found = difference(node.name, planned(node), func, ran_in(func, args, kwargs), where)
                self._found |= {} if found is None else {found: None}
        return func(*args, **kwargs)
