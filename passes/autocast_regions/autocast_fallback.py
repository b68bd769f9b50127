"""Run a graph whose precision cannot be planned as ``torch.autocast`` would run it.

Before: ``h = linear(x, w); return h``. After: ``a = _enter_autocast(...); h = linear(x, w); _exit_autocast(a);
return h.to(torch.float32)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast  # 2.11 to 2.13
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from amp_graph.passes.autocast_regions.region_interpreter import RegionInterpreter
from amp_graph.passes.graph.fake_values import fake_mode_of, keep_trained, tensors, value
from amp_graph.passes.graph.graph_snapshot import Snapshot
from amp_graph.passes.graph.meta_keys import CAPTURED, UNPLANNED
from amp_graph.passes.torch_compat.fake import FakeTensor, tracing_fake


def run_as_autocast(gm: GraphModule, dtype: torch.dtype, device: str, why: str, *, keep_outputs: bool = True) -> None:
    """Put the operations of ``gm`` into an autocast region, in place; exactness: that of ``torch.autocast``.

    ``keep_outputs``: cast outputs back to their captured dtypes. ``why``: the reason, for the report. If the operations
    cannot run under autocast (as fake tensors show), ``gm`` stays as captured, in full precision.
    """
    saved = Snapshot.of(gm)
    try:
        _put_region(gm, dtype, device)
        if keep_outputs:
            _restore_outputs(gm)
        _record(gm)
        how = f"runs under torch.autocast({device!r}, {dtype})"
    except Exception as error:  # whatever an operation, or a tracer of torch, raises
        saved.restore()
        first = str(error).partition("\n")[0]
        how = f"runs as captured: under torch.autocast it fails ({type(error).__name__}: {first})"
    gm.meta[UNPLANNED] = f"{how}, without a plan: {why}"
    gm.recompile()


def _put_region(gm: GraphModule, dtype: torch.dtype, device: str) -> None:
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        entered = gm.graph.call_function(_enter_autocast, (device, dtype, True, True))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(_exit_autocast, (entered,))


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
    with _Recorder(gm, mode) as recorder, tracing_fake(mode), torch.no_grad():
        recorder.run(*(value(n) for n in gm.graph.nodes if n.op == "placeholder"))


class _Recorder(RegionInterpreter):
    """Run a graph on its fake inputs, and record the value of each node."""

    def __init__(self, gm: GraphModule, mode: Any) -> None:
        super().__init__(gm)
        self.mode = mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a fake of the attribute."""
        found = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(found) if isinstance(found, torch.Tensor) else found

    def run_node(self, n: Node) -> Any:
        """Run one node, and record its new value."""
        result = super().run_node(n)
        found = tensors(result)
        if found and n.op not in ("placeholder", "output") and all(isinstance(t, FakeTensor) for t in found):
            keep_trained(result, n.meta.get(CAPTURED))
            n.meta["val"] = result
            n.meta.setdefault(CAPTURED, result)
        return result
