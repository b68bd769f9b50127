"""Runs a graph that cannot be planned as ``torch.autocast`` would run it.

Before: ``h = linear(x, w); return h``. After: ``a = _enter_autocast(...); h = linear(x, w); _exit_autocast(a);
return h.to(torch.float32)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.lists.errors import Attempt, Undo
from amp_graph.passes.graph.fake_values import fake_mode_of, keep_trained, tensors, value
from amp_graph.passes.graph.graph_snapshot import snapshot
from amp_graph.passes.graph.meta_keys import CAPTURED, UNPLANNED
from amp_graph.passes.graph.observe import Observer
from amp_graph.passes.graph.propagate_fake_values import Recorder
from amp_graph.passes.torch_compat.dispatch import ModesOfThread, enter_autocast, exit_autocast
from amp_graph.passes.torch_compat.fake import FakeTensor, tracing_fake


def run_as_autocast(gm: GraphModule, dtype: torch.dtype, device: str, why: str, *, keep_outputs: bool = True) -> None:
    """Put the operations of ``gm`` into an autocast region, in place; exactness: that of ``torch.autocast``.

    ``keep_outputs``: cast outputs back to their captured dtypes. ``why``: the reason, for the report. If the operations
    cannot run under autocast (as fake tensors show), ``gm`` stays as captured, in full precision.
    """
    restore = snapshot(gm)
    how = f"runs under torch.autocast({device!r}, {dtype})"
    with Attempt() as tried:  # whatever an operation, or a tracer of torch, raises
        _put_region(gm, dtype, device)
        if keep_outputs:
            _restore_outputs(gm)
        _record(gm)
    if tried.error is not None:
        restore()
        how = f"runs as captured: under torch.autocast it fails ({tried.reason})"
    gm.meta[UNPLANNED] = f"{how}, without a plan: {why}"
    gm.recompile()


def _put_region(gm: GraphModule, dtype: torch.dtype, device: str) -> None:
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        entered = gm.graph.call_function(enter_autocast, (device, dtype, True, True))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(exit_autocast, (entered,))


def _restore_outputs(gm: GraphModule) -> None:
    """Cast floating-point outputs to their captured dtypes; a tensor that has its dtype is returned without a copy."""
    output = gm.graph.output_node()
    restored: dict[Node, Node] = {}

    def restore(node: Node) -> Node:
        val = value(node)
        if not isinstance(val, torch.Tensor) or not val.is_floating_point() or node.op == "placeholder":
            return node
        if node not in restored:
            with gm.graph.inserting_before(output):
                restored[node] = gm.graph.call_method("to", (node, val.dtype))
        return restored[node]

    output.args = map_arg(output.args, restore)


def _record(gm: GraphModule) -> None:
    """Recompute the values of the nodes; raises the error of any operation that fails."""
    mode = fake_mode_of(gm)
    if mode is None:
        return
    with Undo(ModesOfThread().restore), tracing_fake(mode), torch.no_grad():
        Observer(gm, _NewValues(mode)).run(*(value(n) for n in gm.graph.nodes if n.op == "placeholder"))


class _NewValues(Recorder):
    """Records the new value of each node of a graph that runs on its fake inputs."""

    def value(self, node: Node, result: Any) -> None:
        """Record a value."""
        found = tensors(result)
        if found and node.op != "placeholder" and all(isinstance(t, FakeTensor) for t in found):
            keep_trained(result, node.meta.get(CAPTURED))
            node.meta["val"] = result
            node.meta.setdefault(CAPTURED, result)
