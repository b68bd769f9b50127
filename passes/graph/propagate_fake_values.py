"""Record the fake value of every node of a traced graph, by running it once on fake tensors; inline what it calls.

Before: ``symbolic_trace(model)``, whose nodes know no dtype. After: ``node.meta["val"]`` on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node, Tracer
from torch.utils._pytree import tree_map_only

from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.edit import inline, replace_by
from amp_graph.passes.graph.meta_keys import MODULE
from amp_graph.passes.graph.observe import Observer, Sink
from amp_graph.passes.torch_compat.fake import FakeTensorMode


def record_values(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Fill ``node.meta["val"]``; raises the graph's own error on inputs of these shapes and dtypes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map_only(torch.Tensor, mode.from_tensor, tuple(example_inputs))
    try:
        with mode, torch.enable_grad():  # records also which values require gradients
            made = Observer(gm, Recorder(mode)).run(*fakes)
    except RuntimeError:  # a write to a parameter, which the user makes under no_grad
        with mode, torch.no_grad():
            made = Observer(gm, Recorder(mode)).run(*fakes)
    gm.graph.output_node().meta["val"] = made


class Recorder(Sink):
    """Records the value of each node of a graph that runs on fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    @contextmanager
    def running(self, node: Node) -> Iterator[None]:
        """Name the node in an error, as torch's interpreters do."""
        try:
            yield
        except Exception as error:
            error.args = (f"{error}\n\nWhile executing {node.format_node()}",)
            raise

    def given(self, node: Node, value: Any) -> Any:
        """Return a fake of an attribute, the same one each time."""
        is_real = node.op == "get_attr" and isinstance(value, torch.Tensor)
        return self.mode.from_tensor(value) if is_real else value

    def called(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Call a module with fakes of its parameters and buffers, so that it writes to none."""
        if not isinstance(target, torch.nn.Module):
            return target, args, kwargs
        own = (*target.named_parameters(), *target.named_buffers())
        return torch.func.functional_call, (target, {k: self.mode.from_tensor(t) for k, t in own}, args, kwargs), {}

    def value(self, node: Node, result: Any) -> None:
        """Record a value."""
        node.meta["val"] = result


# -- modules that are called ----------------------------------------------------------------------------------


class _NoLeaves(Tracer):
    """Traces into every module, and records what is done with its buffers instead of doing it."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """No module is a leaf."""
        return False


def inline_modules(gm: GraphModule) -> GraphModule:
    """Inline every call of a module that can be traced alone; other module calls stay as captured.

    Those stay, too, of a module with hooks, which a trace of its forward leaves out, with several results, or with any
    number of arguments.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and not isinstance(gm.get_submodule(str(node.target)), GraphModule):
            _inline(gm, node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _inline(gm: GraphModule, node: Node) -> None:
    path = str(node.target)
    module = gm.get_submodule(path)
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return
    with Attempt() as tried:
        inner = _NoLeaves().trace(module)
    if tried.error is not None:  # a module whose forward depends on values stays a call
        return
    placeholders, result = inner.find_nodes(op="placeholder"), inner.output_node().args[0]
    if not isinstance(result, Node) or any(str(place.target).startswith("*") for place in placeholders):
        return
    defaults = {str(place.target): place.args[0] if place.args else None for place in placeholders}
    given = defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs

    def held(part: Node) -> Node:
        found = gm.graph.get_attr(f"{path}.{part.target}")
        found.meta[MODULE] = path
        return found

    returned, made = inline(gm, inner, given.values(), node, held)
    for part in made:
        part.meta[MODULE] = path
    replace_by(node, returned)
