"""Record the fake value of every node of a traced graph, by running it once on fake tensors.

Before: ``symbolic_trace(model)``, whose nodes know no dtype. After: ``node.meta["val"]`` on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map_only

from amp_graph.passes.torch_compat.fake import FakeTensorMode


def record_values(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Fill ``node.meta["val"]``; raises the graph's own error on inputs of these shapes and dtypes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map_only(torch.Tensor, mode.from_tensor, tuple(example_inputs))
    try:
        with mode, torch.enable_grad():  # records also which values require gradients
            _Recorder(gm, mode).run(*fakes)
    except RuntimeError:  # a write to a parameter, which the user makes under no_grad
        with mode, torch.no_grad():
            _Recorder(gm, mode).run(*fakes)


class _Recorder(Interpreter):
    """Run a graph on fake tensors, and record the value of each node."""

    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.mode = mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a fake of the attribute, the same one each time."""
        found = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(found) if isinstance(found, torch.Tensor) else found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what the module makes of fakes of its parameters and buffers, so that it writes to none."""
        module = self.fetch_attr(str(target))
        own = (*module.named_parameters(), *module.named_buffers())
        return torch.func.functional_call(module, {k: self.mode.from_tensor(t) for k, t in own}, args, kwargs)

    def run_node(self, n: Node) -> Any:
        """Run one node and record its value."""
        n.meta["val"] = result = super().run_node(n)
        return result
