"""Traces a captured graph with its backward, on fake tensors, and divides the trace into a ``Flat``.

Before: the rewritten GraphModule, and the arguments of a call. After: ``trace_flat(gm, args)``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.observe import Observer
from amp_graph.passes.torch_compat.dynamo_capture import one_capture_at_a_time
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits
from amp_graph.passes.torch_compat.fake import make_fx, names_traced_so_far
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.replay.flat_graph import CannotBeFlat, Flat, Output, Partition, Pattern
from amp_graph.replay.watch_products import Watch


def trace_flat(gm: GraphModule, args: Sequence[Any], pattern: Pattern | None = None) -> Flat:
    """Trace ``gm`` and its backward for these arguments; ``pattern`` None: each output's gradient is laid out as it.

    Nothing runs on real data. Raises CannotBeFlat with the reason.
    """
    grad = torch.is_grad_enabled()
    seen = _Traced(gm, args, grad, pattern)
    given = [args[i].detach().requires_grad_(grad and args[i].requires_grad) for i in seen.tensors]
    with (
        Attempt(CannotBeFlat) as tried,
        one_capture_at_a_time(),
        torch.no_grad(),
        without_autocast(),
        collector_waits(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # kernels warn about fake operands
        joint = make_fx(seen, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    if tried.error is not None:
        raise CannotBeFlat(f"it cannot be traced: {tried.reason}") from tried.error
    flat = Partition(joint, seen).flat()
    flat.lost = seen.watch.lost
    return flat


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off, as it is in calls of captured graphs; a backward may run inside of a region."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Traced:
    """The function that is traced; it notes what the outputs are, where forward ends, and what gradients belong to."""

    def __init__(self, gm: GraphModule, args: Sequence[Any], grad: bool, pattern: Pattern | None) -> None:
        self.watch = Watch()
        self.args, self.grad, self.pattern = list(args), grad, pattern
        self.run = Observer(gm, self.watch.nodes)
        self.tensors = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
        self.outputs: tuple[Output, ...] = ()
        self.forward_nodes: dict[str, None] = {}  # names, in order
        self.seed_nodes: list[str] = []
        self.made = 0
        self.routes: list[int] = []

    def __call__(self, *leaves: Tensor) -> list[Any]:
        """Run forward, and backward if gradients are recorded; return new outputs and gradients."""
        with self.watch:
            return self._forward_and_backward(leaves)

    def _forward_and_backward(self, leaves: Sequence[Tensor]) -> list[Any]:
        for i, leaf in zip(self.tensors, leaves, strict=True):
            self.args[i] = leaf
        with torch.set_grad_enabled(self.grad):
            new = self._read(self.run.run(*self.args), leaves)
        self.made = len(new)
        self.forward_nodes = names_traced_so_far()
        return [*new, *self._gradients([t for t in new if t.requires_grad], leaves)]

    def _read(self, results: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Note what the outputs are, and return those that are new tensors."""
        own = {id(leaf): i for i, leaf in zip(self.tensors, leaves, strict=True)}
        memory = {storage_key(leaf) for leaf in leaves}
        new: dict[int, int] = {}
        found, tensors = [], []
        for result in results:
            if not isinstance(result, Tensor):
                found.append(Output(constant=result))
            elif id(result) in own:
                found.append(Output(passed=own[id(result)]))
            else:
                if id(result) not in new:
                    key = storage_key(result)
                    if key is None:
                        raise CannotBeFlat("an output is not an ordinary tensor")
                    if key in memory:
                        raise CannotBeFlat("an output shares memory with an input or with another output")
                    memory.add(key)
                    new[id(result)] = len(new)
                    tensors.append(result)
                found.append(Output(place=new[id(result)], has_gradient=result.requires_grad))
        self.outputs = tuple(found)
        return tensors

    def _gradients(self, outs: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients in the order of ``routes``."""
        if self.pattern is None:
            self.pattern = tuple(tuple(out.stride()) for out in outs)
        edges = Edges(outs, {id(leaf): i for i, leaf in zip(self.tensors, leaves, strict=True)})
        self.routes = edges.routes
        pairs = [(out, steps) for out, steps in zip(outs, self.pattern, strict=True) if steps is not None]
        if not edges.leaves or not pairs:
            return [None for _ in self.routes]
        seeds = [torch.empty_strided(o.shape, s, dtype=o.dtype, device=o.device) for o, s in pairs]
        self.seed_nodes = [name for name in names_traced_so_far() if name not in self.forward_nodes]
        return edges.gradients([out for out, _ in pairs], seeds)


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
