"""A replayed call that runs once more under autograd, because its gradients are differentiated again.

Before: one autograd node for a call, whose backward builds no graph. After: ``SecondRun.gradients``, which a second
backward can differentiate. What that backward brings to the call by both ways, through the outputs and through their
gradients, goes through the second run together, as it would through autograd's own graph: sums that are rounded to a
low precision have its bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import number_of_backward, will_run
from amp_graph.passes.torch_compat.dispatch import is_batched
from amp_graph.replay.flat_graph import Flat

Pairs = list[tuple[Tensor, Tensor]]  # results of the second run, and their gradients
Aliases = Sequence[tuple[Tensor, Tensor]]  # tensors, and the aliases of them that a graph was built on


class SecondRun:
    """The outputs of the second run, on aliases of the arguments that have a gradient."""

    def __init__(self, run: Callable[..., Any], flat: Flat, args: Sequence[Any]) -> None:
        """Run the call; what it writes to is copied first."""
        self._flat = flat
        self.arguments: Mapping[int, Tensor] = {i: args[i] for i in dict.fromkeys(flat.routes)}
        with torch.enable_grad():
            # Aliases, so that a gradient stops there that comes through the arguments' own history as well.
            self._leaves = {i: a.view_as(a) for i, a in self.arguments.items()}
            given = [a.clone() if i in flat.written else self._leaves.get(i, a) for i, a in enumerate(args)]
            results = run(*given)
        self._outs = {o.place: r for o, r in zip(flat.outputs, results, strict=True) if o.place is not None}
        self._waiting: dict[int, Pairs] = {}
        self._nodes: list[weakref.ref[Any]] = []  # in autograd's graph, oldest first
        self._is_over_in = -1  # the number of the backward in which the call itself has had its turn

    def gradients(self, given: Sequence[Tensor | None], node: Any) -> list[Tensor | None]:
        """Return the gradient of each route, which can be differentiated; ``node``: the call's in autograd's graph."""
        pairs = list(zip(*self._split(given), strict=True))
        if not torch.is_grad_enabled() or any(is_batched(g) for _, g in pairs):
            return self._by_route(self.to_arguments(pairs))
        return self._by_route(self.derived(pairs, (), node))

    def derived(self, pairs: Pairs, seeds: Aliases, node: Any) -> list[Tensor | None]:
        """Return what gradients of results bring to ``seeds`` and to each of ``arguments``, to be differentiated.

        The graph of the second run ends in aliases: what is given has a history that may lead there once more, and
        belongs to the graph around.
        """
        given = [(g, g.view_as(g)) for _, g in pairs]
        ends = [(out, alias) for (out, _), (_, alias) in zip(pairs, given, strict=True)]
        found = run_back(ends, [*(alias for _, alias in seeds), *self._leaves.values()])
        seeds = [*seeds, *given]
        made: Any = _Again.apply(self, node, found, seeds, *(raw for raw, _ in seeds), *self.arguments.values())
        return list(made)

    def wait(self, pairs: Pairs, node: Any, me: int) -> bool:
        """Leave gradients to the turn of an older node in the running backward; False if none has one to come.

        That is the call's own ``node``, or one of this run, of which ``me`` is the asking one's number.
        """
        number = number_of_backward()
        older = [node, *(found for known in self._nodes[:me] if (found := known()) is not None)]
        if number == self._is_over_in or not any(map(will_run, older)):
            return False
        self._waiting = {number: [*self._waiting.get(number, []), *pairs]}  # what an earlier one left behind is void
        return True

    def known_as(self, node: Any) -> int:
        """Return the number of a node of this run."""
        self._nodes.append(weakref.ref(node))
        return len(self._nodes) - 1

    def that_wait(self) -> Pairs:
        """Return what waits for a turn in the running backward."""
        return self._waiting.pop(number_of_backward(), [])

    def to_arguments(self, pairs: Pairs) -> list[Tensor | None]:
        """Return what gradients of results bring to each of ``arguments``."""
        return run_back(pairs, list(self._leaves.values()))

    def together(self, given: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Return the gradient of each route, with those that wait for the call's turn; None if none wait."""
        self._is_over_in = number_of_backward()
        waiting = self.that_wait()
        if not waiting:
            return None
        return self._by_route(self.to_arguments([*zip(*self._split(given), strict=True), *waiting]))

    def _split(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [(self._outs[p], g) for p, g in zip(self._flat.with_gradient, given, strict=True) if g is not None]
        return [out for out, _ in pairs], [g for _, g in pairs]

    def _by_route(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the whole sum at the first edge of each argument."""
        left = dict(zip(self.arguments, sums, strict=True))
        return [left.pop(i, None) for i in self._flat.routes]


class _Again(torch.autograd.Function):
    """Hands out gradients that were computed with a graph of their own."""

    @staticmethod
    def forward(ctx: Any, second: SecondRun, node: Any, found: Sequence[Any], seeds: Aliases, *edges: Tensor) -> Any:
        """Return the gradients; the edges lead to the seeds themselves, and to the arguments."""
        ctx.second, ctx.node, ctx.found, ctx.seeds = second, node, found, seeds
        ctx.number = second.known_as(ctx)
        ctx.set_materialize_grads(False)
        return tuple(None if f is None else f.detach() for f in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the edges, or leave those of the arguments to the call's own node."""
        second = ctx.second
        pairs = [(f, g) for f, g in zip(ctx.found, grads, strict=True) if g is not None and f.requires_grad]
        if torch.is_grad_enabled():
            return None, None, None, None, *second.derived(pairs, ctx.seeds, ctx.node)
        to_seeds = run_back(pairs, [alias for _, alias in ctx.seeds])
        if second.wait(pairs, ctx.node, ctx.number):
            return None, None, None, None, *to_seeds, *(None for _ in second.arguments)
        return None, None, None, None, *to_seeds, *second.to_arguments([*pairs, *second.that_wait()])


def run_back(pairs: Pairs, sources: Sequence[Tensor]) -> list[Tensor | None]:
    """Return what gradients of tensors bring to ``sources``, as far as those have a gradient."""
    wanted = [source for source in sources if source.requires_grad]
    if not pairs or not wanted:
        return [None for _ in sources]
    outs, grads, again = [out for out, _ in pairs], [g for _, g in pairs], torch.is_grad_enabled()
    found = iter(torch.autograd.grad(outs, wanted, grads, retain_graph=True, create_graph=again, allow_unused=True))
    return [next(found) if source.requires_grad else None for source in sources]
