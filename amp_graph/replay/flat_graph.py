"""Two flat graphs of ATen calls for a captured graph and its backward, which need no autograd to run.

Before: the rewritten GraphModule, which runs under autograd. After: ``Flat.forward``, which returns the outputs and the
values that backward reads, and ``Flat.backward``, which takes those and the outputs' gradients.

The trace keeps the operations as they are (no functionalization, no decompositions), so the kernels are those that
autograd would run, in its order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, GraphModule, Node

from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.node_info import draws, is_mutable, is_view, schema_arguments, written_by_name
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.replay.recorder import CannotRecord

if TYPE_CHECKING:
    from amp_graph.replay.trace_flat import Traced

# The strides of the gradient that each differentiable output receives; None for an output that receives none.
Pattern = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Output:
    """One output of the captured graph: a new tensor (``place`` in the flat forward's results), or something given.

    ``passed``: the number of the argument that is returned as it is. ``constant``: what is returned if both are None.
    """

    place: int | None = None
    passed: int | None = None
    constant: Any = None
    has_gradient: bool = False


def is_draw(node: Node) -> bool:
    """Say whether a node of a flat graph draws random numbers."""
    if not isinstance(node.target, OpOverload):
        return False
    return draws(node.target, schema_arguments(node.target, node.args, dict(node.kwargs)))


class Flat:
    """Two flat graphs, and how they connect to the captured graph's arguments and outputs.

    tensors: the arguments that forward takes, all that are tensors. made: how many new tensors it returns, in front of
    the saved values. routes: the argument that each gradient of backward belongs to. kept: the arguments that backward
    takes, in front of the saved values and the outputs' gradients. written: the arguments that are written to.
    uncounted: those of them whose version counter the write does not move, as of a batch norm's statistics.
    """

    def __init__(self, joint: GraphModule, seen: Traced) -> None:
        """Divide a traced graph at the end of forward."""
        self.joint, self.seen = joint, seen
        self.tensors, self.outputs, self.made, self.routes = seen.tensors, seen.outputs, seen.made, tuple(seen.routes)
        self.pattern: Pattern = seen.pattern or ()
        nodes = list(joint.graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        self.argument = dict(zip(self.inputs, seen.tensors, strict=True))
        made = [n for n in nodes if n.op not in ("placeholder", "output")]
        self.ahead = [n for n in made if n.name in seen.forward_nodes]
        self.behind = [n for n in made if n.name not in seen.forward_nodes]
        results: Any = joint.graph.output_node().args[0]
        grads = results[self.made :]
        has_backward = any(isinstance(g, Node) for g in grads)
        kept, again, saved = self._read_behind(grads) if has_backward else ([], [], [])
        self.kept, self.saved = tuple(self.argument[n] for n in kept), tuple(n.name for n in saved)
        self.forward = self._forward([*results[: self.made], *saved])
        self.backward = self._backward(kept, again, saved, grads) if has_backward else None
        self.written, self.uncounted = self._written() | self._statistics(), self._statistics() - self._written()
        self.run_forward = direct_calls(self.forward)
        self.run_backward = None if self.backward is None else direct_calls(self.backward)

    @functools.cached_property
    def with_gradient(self) -> tuple[int, ...]:
        """The places, in forward's results, of the outputs that have a gradient."""
        found = dict.fromkeys(o.place for o in self.outputs if o.place is not None and o.has_gradient)
        return tuple(found)

    def _read_behind(self, grads: Sequence[Any]) -> tuple[list[Node], list[Node], list[Node]]:
        """Return what backward reads: arguments, views and constants that it makes again, and saved values."""
        ahead = set(self.ahead)
        kept: dict[Node, None] = {}
        again: dict[Node, None] = {}
        saved: dict[Node, None] = {}

        def read(node: Node) -> None:
            if node in self.argument:
                kept[node] = None
            elif node in ahead:
                if _is_made_again(node, self.argument):
                    for source in node.all_input_nodes:
                        read(source)
                    again[node] = None
                else:
                    saved[node] = None

        for node in self.behind:
            for source in node.all_input_nodes:
                read(source)
        for grad in grads:
            if isinstance(grad, Node):
                read(grad)
        return list(kept), list(again), list(saved)

    def _forward(self, results: Sequence[Node]) -> GraphModule:
        graph = Graph()
        env: dict[Node, Node] = {}
        for n in self.inputs:
            env[n] = graph.node_copy(n)
        for n in self.ahead:
            env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[n] for n in results))
        return _module(self.joint, graph)

    def _backward(
        self, kept: Sequence[Node], again: Sequence[Node], saved: Sequence[Node], grads: Sequence[Any]
    ) -> GraphModule:
        graph = Graph()
        env: dict[Node, Node] = {}
        seeds = set(self.seen.seed_nodes)
        for n in kept:
            env[n] = graph.node_copy(n)
        for n in (*saved, *(n for n in self.behind if n.name in seeds)):
            env[n] = graph.placeholder(n.name)
            env[n].meta = dict(n.meta)
        for n in (*again, *(n for n in self.behind if n.name not in seeds)):
            env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[g] if isinstance(g, Node) else None for g in grads))
        return _module(self.joint, graph)

    def _written(self) -> frozenset[int]:
        """Return the arguments that are written to; refuses those with a gradient."""
        nodes = [n for n in (*self.ahead, *self.behind) if isinstance(n.target, OpOverload) and is_mutable(n.target)]
        found = self._arguments_behind(source for node in nodes for source in written_by_name(node))
        if found & set(self.seen.routes):
            raise CannotRecord("it writes to an input that has a gradient")
        return found

    def _statistics(self) -> frozenset[int]:
        """Return the arguments that batch norms write without saying so in their schemas."""
        return self._arguments_behind(source for node in self.ahead for source in statistics_written_by(node))

    def _arguments_behind(self, sources: Iterable[Node]) -> frozenset[int]:
        """Return the arguments that share memory with nodes."""
        memory = {storage_key(value(n)): i for n, i in self.argument.items()}
        keys = {storage_key(t) for source in sources for t in tensors(value(source))}
        return frozenset(memory[key] for key in keys if key in memory)


def statistics_written_by(node: Node) -> list[Node]:
    """Return the running statistics that a batch norm writes although its schema does not say so."""
    if not isinstance(node.target, OpOverload) or "batch_norm" not in node.target._schema.name:
        return []
    given = schema_arguments(node.target, node.args, dict(node.kwargs))
    if "backward" in node.target._schema.name or not (given.get("training") or given.get("train")):
        return []
    return [s for name in ("running_mean", "running_var") if isinstance(s := given.get(name), Node)]


def _is_made_again(node: Node, arguments: dict[Node, int]) -> bool:
    """Say whether ``node`` is a constant, or a view of an argument: nothing that has to be saved."""
    if node.op == "get_attr":
        return True
    if not (isinstance(node.target, OpOverload) and is_view(node.target) and len(node.all_input_nodes) == 1):
        return False
    (source,) = node.all_input_nodes
    return source in arguments or _is_made_again(source, arguments)


def _module(root: GraphModule, graph: Graph) -> GraphModule:
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(root, graph)
