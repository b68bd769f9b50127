"""Inductor with passes of ours over the ATen graphs that it generates code from.

Before: ``compile_fx(gm, inputs)``.
After: ``compile_with_inductor(gm, inputs, passes=[LowerWeightGradients()])``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import flop_registry

from amp_graph.passes.base import Pass
from amp_graph.passes.casts.product_precision import Lowered
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.meta_keys import LOST
from amp_graph.passes.manager import run_passes
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.dynamo_entries import undisabled
from amp_graph.passes.torch_compat.fake import numel
from amp_graph.passes.torch_compat.inductor import compile_graph, graph_pass_hook, inductor_config

HOOK = "post_grad_custom_pre_pass"


def compile_with_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    passes: Sequence[Pass] = (),
    whole: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm``, and later its backward, with Inductor, running ``passes`` over its flat graphs.

    whole: ``gm`` is the flat graph of a step, which has no backward and is called with Dynamo off. Inductor options
    that the user has set take precedence, as does a custom pass of the user. options: such options for this graph.
    """
    config = inductor_config()
    lowered = Lowered(gm)
    gm.meta[LOST] = lowered.found
    ours: dict[str, Any] = {HOOK: _hook(passes, lowered)} if getattr(config, HOOK) is None else {}
    if whole:
        ours |= {k: v for k, v in options_of_step(gm).items() if hasattr(config, k)}
    compiled: Any = compile_graph(gm, example_inputs, {**ours, **(options or {})})
    return undisabled(compiled) if whole else compiled


def _hook(passes: Sequence[Pass], lowered: Lowered) -> Any:
    """Return passes as an Inductor hook, with their source as the key of its cache.

    ``lowered`` sees each graph first; what Inductor finds in its cache it sees not.
    """

    def run(graph: Graph) -> None:
        lowered.look_at(graph)
        run_passes(_module_of(graph), passes)

    files = (__file__, *sorted({inspect.getfile(type(one)) for one in passes}))
    return graph_pass_hook(run, files, [[repr(one) for one in passes]])


def _module_of(graph: Graph) -> GraphModule:
    owner = graph.owning_module
    return owner if isinstance(owner, GraphModule) else GraphModule(torch.nn.Module(), graph)


# -- options for the code of a whole step -------------------------------------------------------------


KNOWN = ("aten", "prims", "amp_graph", "mkldnn", "mkldnn_rnn")


def options_of_step(gm: GraphModule) -> dict[str, Any]:
    """Return Inductor options for ``gm``, the flat graph of a step.

    At every call, Inductor checks the sizes of inputs, and the sizes that operators return against those they declared.
    Dynamo's guards or our own code have checked the inputs, and torch's and our operators declare the right sizes. On
    the CPU, the calls of a small step are compiled, too.
    """
    used = {n.target.namespace for n in gm.graph.nodes if isinstance(n.target, OpOverload)}
    if not used <= {*KNOWN}:
        return {}
    found: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
    # Our operators are called through Python, which costs more from C++.
    if used <= {"aten", "prims"} and calling_from_cpp_is_profitable(_device(gm), _flops(gm), _elements(gm)):
        found["cpp_wrapper"] = True
    return found


def _device(gm: GraphModule) -> str:
    found = {t.device.type for n in gm.graph.nodes for t in tensors(value(n))}
    return "cpu" if found == {"cpu"} else "several"


def _elements(gm: GraphModule) -> int:
    return sum(numel(t) for n in gm.graph.nodes if n.op == "call_function" for t in tensors(value(n)))


def _flops(gm: GraphModule) -> int:
    return sum(_flops_of(n) for n in gm.graph.nodes if n.op == "call_function")


def _flops_of(node: Node) -> int:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args = [value(a) if isinstance(a, Node) else a for a in node.args]
    return int(count(*args, out_val=value(node)))


# FLOPs and elements of a step of about ten milliseconds: in shorter steps, call overhead is worth removing.
MOST_FLOPS, MOST_ELEMENTS = 1 << 30, 1 << 24


def calling_from_cpp_is_profitable(device: str, flops: int, elements: int) -> bool:
    """Say whether a step of so many ``flops`` and result ``elements`` should also get its calls compiled to C++.

    Time on the CPU: three layers of width 256 at batch 32: 0.85 to 0.9; the demo's residual network (0.6 GFLOP, 12
    million elements): 0.93 to 0.96. The C++ compiler takes about ten seconds more.
    """
    return device == "cpu" and flops <= MOST_FLOPS and elements <= MOST_ELEMENTS
