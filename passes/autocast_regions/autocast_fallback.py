"""Runs a graph that cannot be planned as ``torch.autocast`` would run it.

Before: ``h = linear(x, w); return h``. After: ``a = _enter_autocast(...); h = linear(x, w); _exit_autocast(a);
return h.to(torch.float32)``. A graph with such regions runs node by node in ``with RegionInterpreter(gm) as run``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.fake_values import fake_mode_of, keep_trained, tensors, value
from amp_graph.passes.graph.graph_snapshot import Snapshot
from amp_graph.passes.graph.meta_keys import CAPTURED, UNPLANNED
from amp_graph.passes.torch_compat.dispatch import enter_autocast, exit_autocast
from amp_graph.passes.torch_compat.fake import FakeTensor, tracing_fake

Own = TypeVar("Own", bound="RegionInterpreter")


class RegionInterpreter(Interpreter):
    """An interpreter that leaves the autocast regions that it entered: by a node of the graph, or at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``torch.fx.Interpreter`` takes."""
        super().__init__(*args, **kwargs)
        self.entered: list[Any] = []

    def __enter__(self: Own) -> Own:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the regions that are open."""
        for region in reversed(self.entered):
            exit_autocast(region)

    def run(self, *args: Any, **_: Any) -> Any:
        """Run all nodes; torch's ``run`` starts a thread of tqdm, which stays in the process."""
        self.env, self.args_iter = {}, iter(self.graph.process_inputs(*args))
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
        return self.env[node]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and track open regions."""
        result = super().call_function(target, args, kwargs)
        if target is enter_autocast:
            self.entered.append(result)
        elif target is exit_autocast:
            self.entered.remove(args[0])
        return result


def run_as_autocast(gm: GraphModule, dtype: torch.dtype, device: str, why: str, *, keep_outputs: bool = True) -> None:
    """Put the operations of ``gm`` into an autocast region, in place; exactness: that of ``torch.autocast``.

    ``keep_outputs``: cast outputs back to their captured dtypes. ``why``: the reason, for the report. If the operations
    cannot run under autocast (as fake tensors show), ``gm`` stays as captured, in full precision.
    """
    saved = Snapshot.of(gm)
    how = f"runs under torch.autocast({device!r}, {dtype})"
    with Attempt() as tried:  # whatever an operation, or a tracer of torch, raises
        _put_region(gm, dtype, device)
        if keep_outputs:
            _restore_outputs(gm)
        _record(gm)
    if tried.error is not None:
        saved.restore()
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
