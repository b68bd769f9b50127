"""Runs a graph node by node, unchanged, and gives every value and every gradient to a sink.

Before: a captured graph. After: ``Observer(gm, sink, memory).run(*args)``, in which the sink gets what it watches: the
results of nodes, and, while the caller's backward runs, the gradients of results and of reads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.graph.bodies import OPERATORS
from amp_graph.passes.graph.fake_values import tensors
from amp_graph.passes.torch_compat.autograd import add_hook, next_sequence_number, running_sequence_number

Hook = Callable[[torch.Tensor], None]


class Sink:
    """What an ``Observer`` gives its values to; this one watches nothing."""

    def running(self, node: Node) -> AbstractContextManager[Any]:
        """Return the context in which ``node`` runs."""
        return nullcontext()

    def given(self, node: Node, value: Any) -> Any:
        """Return what the graph reads for ``node``, an input or an attribute, which is given as ``value``."""
        return value

    def called(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return what is called, and its arguments, for a call of ``target``, a function or a module."""
        return target, args, kwargs

    def value(self, node: Node, result: Any) -> None:
        """Take the result of ``node``; called in graph order, for inputs and parameters as well."""

    def of_result(self, node: Node, part: int) -> Hook | None:
        """Return what takes the gradient of tensor ``part`` of the result of ``node``; None: nothing does."""
        return None

    def of_read(self, reader: Node, source: Node, value: torch.Tensor, is_written: bool) -> Hook | None:
        """Return what takes the gradient that ``reader`` returns for ``source``, which is ``value``; None: nothing.

        ``is_written``: whether the graph writes to that value, so that to keep it takes a copy.
        """
        return None


class GradientSink(Sink):
    """A sink of all gradients; it must not keep results alive that the graph writes to later, but copies."""

    def gradient(self, node: Node, grad: torch.Tensor, part: int) -> None:
        """Take the gradient of the result of ``node``, once for each tensor in it; ``part``: which of them."""

    def returned(self, reader: Node, source: Node, grad: torch.Tensor) -> None:
        """Take the gradient that the backward of ``reader`` returned for the value of ``source``."""

    def of_result(self, node: Node, part: int) -> Hook | None:
        """Watch every result."""
        return partial(self.gradient, node, part=part)

    def of_read(self, reader: Node, source: Node, value: torch.Tensor, is_written: bool) -> Hook | None:
        """Watch every read of an operation."""
        return None if reader.op == "output" else partial(self.returned, reader, source)


class RunningNode(Sink):
    """Knows which node a call belongs to: in backward, that whose forward made its part of autograd's graph."""

    def __init__(self) -> None:
        self._running: list[Node] = []  # the innermost last
        self._starts: list[int] = []  # sequence numbers of autograd at which nodes began, in order
        self._nodes: list[Node | None] = []
        self._thread = threading.get_ident()

    @contextmanager
    def running(self, node: Node) -> Iterator[None]:
        """Ascribe what runs to ``node``; afterwards, to the outer node that goes on, or to none."""
        self._running.append(node)
        self._mark(node)
        try:
            yield
        finally:
            self._running.pop()
            self._mark(self._running[-1] if self._running else None)

    def _mark(self, node: Node | None) -> None:
        if threading.get_ident() == self._thread:  # on CUDA, what backward runs again has numbers of another thread
            self._starts.append(next_sequence_number())
            self._nodes.append(node)

    def now(self, *, backward: bool) -> Node | None:
        """Return the node of the call that runs now."""
        if self._running or not backward:
            return self._running[-1] if self._running else None
        at = bisect_right(self._starts, running_sequence_number()) - 1
        return self._nodes[at] if 0 <= at < len(self._nodes) else None


class Observer(Interpreter):
    """One graph whose runs are observed; ``run`` takes the graph's inputs and returns its outputs.

    ``memory``: who writes to which value; without it no gradient is watched. ``bodies``: what runs the graphs inside
    it, by name; the operators over them then run as Python, see ``OPERATORS``. ``leaves``: after a run, the inputs
    that require gradients, to differentiate for.
    """

    def __init__(
        self,
        gm: torch.nn.Module,
        sink: Sink,
        memory: Memory | None = None,
        bodies: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.memory, self.sink, self.bodies = memory, sink, bodies or {}
        self.leaves: list[torch.Tensor] = []
        self._node: Any = None

    def run(self, *args: Any, **_: Any) -> Any:
        """Run the graph once; torch's ``run`` starts a thread of tqdm, which stays in the process."""
        self.leaves, self.env = [], {}
        self.args_iter = iter(self.graph.process_inputs(*args))
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
            for used in self.user_to_last_uses.get(node, ()):
                del self.env[used]
        return self.graph.process_outputs(self.env[node])

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and give its result to the sink."""
        self._node = n
        with self.sink.running(n):
            result = super().run_node(n)
        if n.op != "output":
            self.sink.value(n, result)
            if n.op not in ("placeholder", "get_attr") and self.memory is not None:
                self._watch_result(n, result)
        return result

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Note the inputs to differentiate for."""
        given = self.sink.given(self._node, super().placeholder(target, args, kwargs))
        if self.memory is not None and isinstance(given, torch.Tensor) and given.requires_grad:
            self.leaves.append(given)
        return given

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what runs a body, or what the graph holds."""
        return self.bodies.get(str(target)) or self.sink.given(self._node, super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, or run those over ``bodies`` as Python."""
        if any(body is given for body in self.bodies.values() for given in args):
            return OPERATORS[target.__name__](*args)
        return super().call_function(*self.sink.called(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a module."""
        module, args, kwargs = self.sink.called(self.fetch_attr(str(target)), args, kwargs)
        return module(*args, **kwargs)

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[Any, Any]:
        """Give every reader its own alias, which receives the gradient of that read."""
        if self.memory is None:
            return super().fetch_args_kwargs_from_env(n)
        read = {source: self._watched(source, n, self.memory.is_written(source)) for source in n.all_input_nodes}
        args, kwargs = (map_arg(given, read.__getitem__) for given in (n.args, n.kwargs))
        return args, kwargs

    def _watched(self, source: Node, reader: Node, is_written: bool) -> Any:
        given = self.env[source]
        hook = self.sink.of_read(reader, source, given, is_written) if _is_differentiated(given) else None
        if hook is None:
            return given
        # A write to an alias would replace the alias's autograd node.
        seen = given if is_written else given.view_as(given)
        _register(seen, hook)
        return seen

    def _watch_result(self, node: Node, result: Any) -> None:
        for part, tensor in enumerate(tensors(result)):
            hook = self.sink.of_result(node, part) if _is_differentiated(tensor) else None
            if hook is not None:
                _register(tensor, hook)


def _register(tensor: torch.Tensor, hook: Hook) -> None:
    def run(grad: torch.Tensor | None) -> None:
        if grad is not None:
            hook(grad.detach())

    if not tensor.is_leaf:
        add_hook(tensor, run)


def _is_differentiated(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    return plain and value.is_floating_point() and value.requires_grad and torch.is_grad_enabled()
