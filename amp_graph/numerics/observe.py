"""Runs a captured graph node by node, unchanged, and tells of every value and every gradient.

Before: a captured graph, with what the passes before planning recorded on it. After:
``Observer(gm, memory, sink).run(*args)`` calls ``sink.value(node, result)`` after each node, and, while the caller's
backward runs, ``sink.gradient(node, grad, part)`` with the gradient of its result and ``sink.returned(reader, source,
grad)`` with the gradient that ``reader`` returned for ``source``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from amp_graph.numerics.run_bodies import OPERATORS
from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.graph.fake_values import tensors


class Sink(Protocol):
    """What an ``Observer`` tells; it must not keep results alive that the graph writes to later, but copies."""

    def value(self, node: Node, result: Any) -> None:
        """Take the result of ``node``; called in graph order, for inputs and parameters as well."""

    def gradient(self, node: Node, grad: torch.Tensor, part: int) -> None:
        """Take the gradient of the result of ``node``, once for each tensor in it; ``part``: which of them."""

    def returned(self, reader: Node, source: Node, grad: torch.Tensor) -> None:
        """Take the gradient that the backward of ``reader`` returned for the value of ``source``."""


class Observer(Interpreter):
    """One graph whose runs are observed; ``run`` takes the graph's inputs and returns its outputs.

    ``bodies``: what runs the graphs inside it, by name; the operators over them then run as Python, see
    ``run_bodies``. ``leaves``: after a run, the inputs that require gradients, to differentiate for.
    """

    def __init__(
        self, gm: GraphModule, memory: Memory, sink: Sink, bodies: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.memory, self.sink, self.bodies = memory, sink, bodies or {}
        self.leaves: list[torch.Tensor] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph once."""
        self.leaves = []
        return super().run(*args, **kwargs)

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and tell of its result."""
        result = super().run_node(n)
        if n.op != "output":
            self.sink.value(n, result)
            if n.op not in ("placeholder", "get_attr"):
                self._watch_result(n, result)
        return result

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Note the inputs to differentiate for."""
        given = super().placeholder(target, args, kwargs)
        if isinstance(given, torch.Tensor) and given.requires_grad:
            self.leaves.append(given)
        return given

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what runs a body, or what the graph holds."""
        return self.bodies.get(str(target)) or super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, or run those over ``bodies`` as Python."""
        if any(body is given for body in self.bodies.values() for given in args):
            return OPERATORS[target.__name__](*args)
        return super().call_function(target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[Any, Any]:
        """Give every reader its own alias, which receives the gradient of that read."""
        read = {source: self._watched(source, n) for source in n.all_input_nodes}
        args, kwargs = (map_arg(given, read.__getitem__) for given in (n.args, n.kwargs))
        return args, kwargs

    def _watched(self, source: Node, reader: Node) -> Any:
        given = self.env[source]
        if not _is_differentiated(given) or reader.op == "output":
            return given
        # A write to an alias would replace the alias's autograd node.
        seen = given if self.memory.is_written(source) else given.view_as(given)
        if not seen.is_leaf:
            seen.register_hook(lambda grad: None if grad is None else self.sink.returned(reader, source, grad.detach()))
        return seen

    def _watch_result(self, node: Node, result: Any) -> None:
        def tell(grad: torch.Tensor | None, part: int) -> None:
            if grad is not None:
                self.sink.gradient(node, grad.detach(), part)

        for part, tensor in enumerate(tensors(result)):
            if _is_differentiated(tensor) and not tensor.is_leaf:
                tensor.register_hook(partial(tell, part=part))


def _is_differentiated(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    return plain and value.is_floating_point() and value.requires_grad and torch.is_grad_enabled()
