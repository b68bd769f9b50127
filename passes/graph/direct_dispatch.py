"""Run a graph of operator calls with every operator bound once.

Before: ``torch.ops.aten.mm.default(a, b)``, which looks up four attributes and makes a Python call. After:
``op_3(a, b)``: torch's Python binding of that operator if there is one, else the dispatcher's function. This saves 1 to
4 microseconds per operator.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.node_info import is_view
from amp_graph.passes.native.operator_library import FUNCTIONS
from amp_graph.passes.torch_compat.dispatch import OpOverload, dispatched, is_seen

CALL = re.compile(r"\btorch\.ops\.(\w+\.\w+\.\w+)(?=\()")
ATEN = torch.ops.aten
# Python bindings that parse their arguments faster, and dispatch the same operator.
BINDINGS: dict[OpOverload, Callable[..., Any]] = {
    ATEN.add.Tensor: torch.add,
    ATEN.add_.Tensor: Tensor.add_,
    ATEN.addmm.default: torch.addmm,
    ATEN.as_strided.default: torch.as_strided,
    ATEN.bmm.default: torch.bmm,
    ATEN.clone.default: torch.clone,
    ATEN.contiguous.default: Tensor.contiguous,
    ATEN.copy_.default: Tensor.copy_,
    ATEN.detach.default: Tensor.detach,
    ATEN.expand.default: Tensor.expand,
    ATEN.mm.default: torch.mm,
    ATEN.mul.Tensor: torch.mul,
    ATEN.permute.default: torch.permute,
    ATEN.relu.default: torch.relu,
    ATEN.reshape.default: torch.reshape,
    ATEN.select.int: torch.select,
    ATEN.squeeze.dim: torch.squeeze,
    ATEN.sum.dim_IntList: torch.sum,
    ATEN.t.default: torch.t,
    ATEN.transpose.int: torch.transpose,
    ATEN.unflatten.int: Tensor.unflatten,
    ATEN.unsqueeze.default: torch.unsqueeze,
    ATEN.view.default: Tensor.view,
}


def direct_calls(gm: GraphModule) -> Callable[..., Any]:
    """Return a function that does what ``gm.forward`` does, with every operator bound once. Exactness: bit-exact."""
    _reshape_views(gm)
    code = gm.graph.python_code("self")
    paths = sorted(set(CALL.findall(code.src)))
    names = {path: f"op_{i}_of_amp_graph" for i, path in enumerate(paths)}
    root: Any = torch.ops
    operators = {names[path]: _bound(reduce(getattr, path.split("."), root)) for path in paths}
    source = CALL.sub(lambda found: names[found[1]], code.src)
    space: dict[str, Any] = {**code.globals, **operators}
    exec(compile(source, f"<{__name__}>", "exec"), space)
    return types.MethodType(space["forward"], gm)


def _reshape_views(gm: GraphModule) -> None:
    """Replace each view by a reshape, as a view that was possible in tracing may not be possible at run time.

    Tracing gets strides from torch's meta functions, some of which differ from the kernel's: batch norm of a transposed
    [batch, channels, length] is contiguous on CPU, but traced with the strides of its input. Where eager PyTorch copies
    (``reshape``, or a backward formula), tracing recorded a view. A view stays a view if its memory is written later
    and other nodes read it too: a copy would miss the write, or hide it.
    """
    views = gm.graph.find_nodes(op="call_function", target=ATEN.view.default)
    if not views:
        return
    lifetimes, end = Lifetimes.of(gm), gm.graph.output_node()
    for view in views:
        if not (lifetimes.is_written_between(view, view, end) and _is_read_elsewhere(view)):
            view.target = ATEN.reshape.default


def _is_read_elsewhere(view: Node) -> bool:
    """Say whether any other node reads the base of ``view``."""
    while isinstance(view.target, OpOverload) and is_view(view.target):
        view = view.all_input_nodes[0]
        if len(view.users) > 1:
            return True
    return False


def _bound(operator: OpOverload) -> Callable[..., Any]:
    if operator in BINDINGS:
        return BINDINGS[operator]
    function, schema = FUNCTIONS.get(str(operator)), operator._schema
    # The dispatcher must record writes (version counters).
    plain = not schema.is_mutable and str(schema.arguments[0].type) == "Tensor"
    return _unless_seen(dispatched(operator), function) if function and plain else dispatched(operator)


def _unless_seen(operator: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` directly unless autograd or a mode has to see the operator."""

    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = operator if torch.is_grad_enabled() or is_seen(first) else function
        return run(first, *args, **kwargs)

    return call
