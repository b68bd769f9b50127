"""The gradients that reach an argument of a graph, one for each edge of autograd's graph that leads there.

Before: autograd adds what arrives at a tensor one by one, also from readers outside of the captured graph, such as a
second call with the same weights. After: a flat backward hands out each of those gradients by itself, in the order of
their arrival, so that autograd outside adds them in the same order, to the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Gradients of one argument with more edges (the weights of a loop) are added inside, as each takes the argument's size.
MOST = 8


class Edges:
    """The edges of autograd's graph of ``outs`` that lead to leaves; those run first that were made last."""

    def __init__(self, outs: Sequence[Tensor], number: Mapping[int, int]) -> None:
        """Find them; ``number``: the argument's number of each leaf, by id."""
        found = _edges_to(outs, number)
        many = {i for i, count in Counter(i for _, _, i in found).items() if count > MOST}
        self._single = [edge for edge in found if edge[2] not in many]
        self.leaves = {number[id(leaf)]: leaf for leaf in _leaves_of(found)}
        self._summed = sorted(many)
        self.routes = [*(i for _, _, i in self._single), *self._summed]

    def gradients(self, outs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """Run backward, and return the gradient of each of ``routes``."""
        arrived: dict[int, Tensor] = {}
        hooks = []
        for place, (node, _, _) in enumerate(self._single):
            hooks.append(node.register_hook(self._keeping(place, arrived)))
        try:
            leaves = list(self.leaves.values())
            sums = dict(zip(self.leaves, torch.autograd.grad(outs, leaves, seeds, allow_unused=True), strict=True))
        finally:
            for hook in hooks:
                hook.remove()
        single = [arrived.get(place) for place in range(len(self._single))]
        return [*single, *(sums[i] for i in self._summed)]

    def _keeping(self, place: int, arrived: dict[int, Tensor]) -> Any:
        """Return a hook that keeps one gradient of a node."""
        at = self._single[place][1]

        def keep(grads: Sequence[Tensor | None], _: Any) -> None:
            grad = grads[at]
            if grad is not None:
                arrived[place] = grad

        return keep


def _edges_to(outs: Sequence[Tensor], number: Mapping[int, int]) -> list[tuple[Any, int, int]]:
    """Return (node, place among its inputs, argument) of each edge to a leaf, in the order of autograd's engine."""
    left = [out.grad_fn for out in outs if out.grad_fn is not None]
    seen = set(left)
    found = []
    while left:
        node = left.pop()
        for place, (source, _) in enumerate(node.next_functions):
            leaf = getattr(source, "variable", None)
            if leaf is not None:
                if id(leaf) in number:
                    found.append((node, place, number[id(leaf)]))
            elif source is not None and source not in seen:
                seen.add(source)
                left.append(source)
    return sorted(found, key=lambda edge: (-edge[0]._sequence_nr(), edge[1]))


def _leaves_of(found: Sequence[tuple[Any, int, int]]) -> list[Tensor]:
    leaves = {id(leaf): leaf for node, place, _ in found for leaf in [node.next_functions[place][0].variable]}
    return list(leaves.values())
