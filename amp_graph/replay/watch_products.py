"""Watches a trace for products that run in another precision than planned.

Before: a rewritten graph whose nodes carry marks, traced with its backward. After: ``Watch.lost``, a record of each.
The products of backward belong to the node whose forward made their part of autograd's graph.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from amp_graph.passes.casts.product_precision import Lost, difference, kind_of, planned, ran_in
from amp_graph.passes.torch_compat.autograd import next_sequence_number, running_sequence_number
from amp_graph.passes.torch_compat.dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Sees each operation of a trace; ``of(node)``: those that follow belong to ``node``."""

    def __init__(self) -> None:
        """Nothing has run yet."""
        super().__init__()
        self._found: dict[Lost, None] = {}
        self._now: list[Node] = []
        self._starts: list[int] = []  # the first number of autograd's nodes of each of ``_owners``
        self._owners: list[Node | None] = []

    @property
    def lost(self) -> tuple[Lost, ...]:
        """The products that ran in another precision than planned, each once."""
        return tuple(self._found)

    @contextlib.contextmanager
    def of(self, node: Node) -> Iterator[None]:
        """Ascribe what runs to ``node``, and later what its part of autograd's graph runs."""
        self._now.append(node)
        self._ascribe(node)
        try:
            yield
        finally:
            self._now.pop()
            self._ascribe(self._now[-1] if self._now else None)

    def _ascribe(self, node: Node | None) -> None:
        self._starts.append(next_sequence_number())
        self._owners.append(node)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare one operation with the plan, and run it."""
        kwargs = kwargs or {}
        if kind_of(func):
            number = running_sequence_number()
            node = self._now[-1] if self._now else self._owner(number)
            if node is not None:
                where = "" if number < 0 else "in backward"
                found = difference(node.name, planned(node), func, ran_in(func, args, kwargs), where)
                self._found |= {} if found is None else {found: None}
        return func(*args, **kwargs)

    def _owner(self, number: int) -> Node | None:
        """Return the node that made a node of autograd's graph."""
        place = bisect.bisect_right(self._starts, number) - 1
        return self._owners[place] if number >= 0 and place >= 0 else None
