"""Runs one graph node by node: as it is, in fp64, or with each operation once more in fp64, on the same inputs.

Before: a graph in some precision. After: ``Widened(gm, sink, memory).run(*args)``, which returns outputs in their
captured dtypes, whatever ran inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.identify_ops import operations_of
from amp_graph.passes.graph.meta_keys import CAST, MARK
from amp_graph.passes.graph.node_info import HALVES, draws, is_higher_order, is_zero
from amp_graph.passes.graph.observe import Observer

OUTSIDE = ("placeholder", "get_attr")  # what a graph reads that others read as well


class Restoring(Observer):
    """Runs a graph; its outputs get their captured dtypes, where it ``is_whole`` and not inside of another."""

    is_whole = True

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[Any, Any]:
        """Cast what the graph returns to the dtype that was captured; a graph inside it hands on what it has."""
        if n.op == "output" and self.is_whole:
            for source in n.all_input_nodes:
                found = self.env[source]
                if is_eligible(captured(source)) and isinstance(found, torch.Tensor) and found.is_floating_point():
                    self.env[source] = found.float()
        return super().fetch_args_kwargs_from_env(n)


class Widened(Restoring):
    """Runs a graph in float64: its float32 inputs, parameters, constants and conversions are widened.

    What it writes to them is written to the caller's tensors at its end: other graphs of the call read those.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, in which new tensors without a dtype are float64 as well."""
        assert self.memory is not None, "given by who compares"
        before, self._widened = torch.get_default_dtype(), dict[str, tuple[Any, Any]]()
        torch.set_default_dtype(torch.float64)
        try:
            result = super().run(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        for node in self.graph.nodes:
            if str(node.target) in self._widened and node.op in OUTSIDE and self.memory.is_written(node):
                given, values = self._widened[str(node.target)]
                # With its gradients, unless it is a parameter.
                with torch.set_grad_enabled(torch.is_grad_enabled() and not (given.is_leaf and given.requires_grad)):
                    given.copy_(values)
        return result

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Widen an input."""
        return self._wide(target, super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Widen a constant."""
        return self._wide(target, super().get_attr(target, args, kwargs))

    def _wide(self, target: Any, given: Any) -> Any:
        made = wide(given)
        if made is not given and isinstance(given, torch.Tensor):
            self._widened[str(target)] = given, made
        return made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call with float64 in the place of float32."""
        return super().call_function(target, *wide_dtypes(args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call with float64 in the place of float32."""
        return super().call_method("double" if target == "float" else target, *wide_dtypes(args, kwargs))


class Checked(Restoring):
    """Runs a planned graph, and each of its operations once more in float64, on the same inputs."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; results are kept until its end, as casts of them are read later than they are."""
        self._kept: dict[Node, Any] = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: Node) -> Any:
        """Run ``n``, and tell the sink what it returns in float64."""
        inputs = {origin(s).name: self._kept[origin(s)] for s in n.all_input_nodes if origin(s) in self._kept}
        exact = exact_result(n, inputs) if MARK in n.meta and not is_higher_order(n) else None
        result = super().run_node(n)
        if CAST not in n.meta and n.op != "output":
            self._kept[n] = result
        if exact is not None:
            self.sink.local(n, result, exact)  # type: ignore[attr-defined]
        return result


# -- one operation in fp64: its own error apart from that of its inputs ----------------------------------------


Exact = tuple[Tensor, Mapping[str, Tensor]]  # the first result of an operation in float64; its inputs, by their nodes


def origin(node: Node) -> Node:
    """Return the node whose value an inserted cast casts; the node itself if it is none."""
    source = node.args[0] if CAST in node.meta and node.args else node
    return source if isinstance(source, Node) else node


def exact_result(node: Node, inputs: Mapping[str, Any]) -> Exact | None:
    """Return the result of ``node`` in float64; ``inputs``: the values that it reads, before they are cast.

    None for operations that draw random numbers, that have no kernel for float64, or that return no tensor. The inputs
    are copies: an operation that writes to them changes nothing.
    """
    operations = operations_of(node)
    # A recurrent layer draws with dropout only.
    if any(draws(o.op, dict(o.arguments)) and not is_zero(o.arguments.get("dropout")) for o in operations):
        return None
    copies = {name: tree_map(_copy, value) for name, value in inputs.items()}
    # An operation may write to these: they are no leaves that require gradients, nor views of one.
    given_to = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, copies)
    try:
        args, kwargs = wide_dtypes(
            *(map_arg(given, lambda s: given_to[origin(s).name]) for given in (node.args, node.kwargs))
        )
        with torch.enable_grad():
            if node.op == "call_method":
                name = "double" if node.target == "float" else str(node.target)
                made = getattr(args[0], name)(*args[1:], **kwargs)
            else:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, KeyError):  # KeyError: an input that is no value
        return None
    first = first_of(made)
    return None if first is None else (first, {name: t for name, t in copies.items() if isinstance(t, Tensor)})


def first_of(result: Any) -> Tensor | None:
    """Return the tensor of a result that is compared: itself, or the first of several; None if it is not dense."""
    found = result[0] if isinstance(result, (tuple, list)) and result else result
    plain = isinstance(found, Tensor) and found.layout == torch.strided and not found.is_nested
    return found if plain and found.is_floating_point() else None


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)
    return copied.requires_grad_(leaf.requires_grad)


def in_full(leaf: Any) -> Any:
    """Return an argument in float32 if it is in low precision: of a tensor a copy, as an operation may write to it."""
    if isinstance(leaf, torch.dtype):
        return torch.float32 if leaf in HALVES else leaf
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(torch.float32 if leaf.dtype in HALVES else leaf.dtype, copy=True)


def wide(given: Any) -> Any:
    """Return a float32 tensor in float64."""
    return given.double() if isinstance(given, Tensor) and given.dtype == torch.float32 else given


def wide_dtypes(args: Any, kwargs: Any) -> Any:
    """Return the arguments of a call with float64 in the place of float32."""
    return tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs))
