"""What must not be recorded, each with its reason.

A recording repeats kernels with the addresses, sizes and numbers of one call. What asks the device for a value, what
copies between host and device, and what Python decides anew at each call would be repeated as it was.

Several processes: the hooks of DistributedDataParallel run when the gradient of a parameter arrives, thus after a
recorded backward, as after any other: no recording holds a call between ranks. What communicates inside of forward or
backward, or moves parameters between them, is not recorded.

One node of autograd stands for a recorded call, so that autograd goes on to all of its arguments. Where the loss may
leave some out, by an output that does not lead to them, their hooks would be called with None, and a Python function
upstream would make zeros of it: such graphs are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.node_info import calls_torch, is_higher_order, is_mutable, schema_arguments
from amp_graph.passes.torch_compat.dispatch import PLAIN, OpOverload
from amp_graph.passes.torch_compat.modules import is_fsdp, surrounding_ddp
from amp_graph.passes.weights.batch_weight_casts import has_process_group
from amp_graph.replay.flat_graph import Flat, is_draw
from amp_graph.replay.recorder import RECORDERS

KNOWN = frozenset(("aten", "prims", "amp_graph", "mkldnn", "torchvision"))  # operators that only launch kernels
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "c10d_functional", "_dtensor"))
# Their CUDA kernels read a value on the host; torch has no tag for that.
WAITS = frozenset(
    "_linalg_check_errors linalg_eig _linalg_eigh _linalg_svd linalg_lstsq _ctc_loss _use_cudnn_ctc_loss "
    "repeat_interleave histc bincount".split()
)
CHANGES_MEMORY = frozenset("set_ resize_ resize_as_ record_stream".split())
Rule = Callable[[Node, torch.device], str]


def why_not_captured(gm: GraphModule, args: Sequence[Any]) -> str:
    """Return why a captured graph cannot be recorded, read off it before it is traced; "" if nothing says so."""
    kinds = {a.device.type for a in args if isinstance(a, Tensor)}
    for kind in sorted(kinds - set(RECORDERS)):
        return f"there are no CUDA graphs on {kind}"
    if not kinds:
        return "it has no tensors as inputs"
    for a in args:
        if isinstance(a, Tensor) and (type(a) not in PLAIN or a.layout is not torch.strided):
            return f"an input is a {type(a).__name__}, not an ordinary tensor"
    for part in (part for part in gm.modules() if isinstance(part, GraphModule)):
        for node in part.graph.nodes:
            if node.op == "call_function" and not calls_torch(node) and not is_higher_order(node):
                name = getattr(node.target, "__qualname__", str(node.target))
                return f"it calls {name}, Python code that would not run again"
            if node.op == "call_method" and str(node.target).startswith("register_"):
                return f"it calls {node.target}: the hook would not run again"
            if node.op == "get_attr" and _is_trained(part, str(node.target)):
                return f"it holds {node.target}, which has a gradient, as a constant"
    return ""


def _is_trained(gm: GraphModule, path: str) -> bool:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, Tensor) and found.requires_grad


def why_not_flat(flat: Flat, args: Sequence[Any], by_copy: Sequence[int]) -> str:
    """Return why flat graphs must not be recorded; "" if they may be. ``by_copy``: arguments that are copied."""
    given = {args[i].device for i in flat.tensors}
    if len(given) != 1:
        return f"its inputs are on {' and '.join(sorted(map(str, given))) or 'no device'}"
    if flat.written & set(by_copy):
        return "it writes to an input that belongs to the caller"
    (device,) = given
    for gm, is_backward in ((flat.forward, False), (flat.backward, True)):
        for node in gm.graph.nodes if gm is not None else ():
            if why := next(filter(None, (rule(node, device) for rule in RULES)), ""):
                return why
            if is_backward and is_draw(node):
                return "backward draws random numbers, as a checkpoint does that runs forward again"
    return ""


def _foreign(node: Node, _: torch.device) -> str:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return f"it calls {node.target}, which holds code of its own" if is_higher_order(node) else ""
    if node.target.namespace in COLLECTIVES:
        return f"it communicates between ranks: {node.target}"
    if node.target.namespace not in KNOWN:
        return f"it calls {node.target}, a custom operator, which may do more than launch kernels"
    return ""


def _asks_for_data(node: Node, _: torch.device) -> str:
    if not isinstance(node.target, OpOverload):
        return ""
    tags, name = node.target.tags, node.target._schema.name.partition("::")[2]
    if torch.Tag.data_dependent_output in tags or name in WAITS:
        return f"{name} waits for a value of the device"
    if torch.Tag.dynamic_output_shape in tags:
        return f"the shape of {name}'s result depends on data"
    if name in CHANGES_MEMORY:
        return f"{name} changes memory that a recording would go on using"
    return ""


def _selects_by_mask(node: Node, _: torch.device) -> str:
    """``x[mask] = y`` counts the mask's elements on the host."""
    if not isinstance(node.target, OpOverload) or "index_put" not in node.target._schema.name:
        return ""
    indices: Any = schema_arguments(node.target, node.args, dict(node.kwargs)).get("indices")
    masks = [t for n in indices if isinstance(n, Node) for t in tensors(value(n))]
    return "a mask selects what is written" if any(t.dtype in (torch.bool, torch.uint8) for t in masks) else ""


def _elsewhere(node: Node, device: torch.device) -> str:
    if node.op == "output":
        return ""
    found = {t.device for t in tensors(value(node))} - {device}
    return f"{node.name} is on {next(iter(found))}, not on {device}" if found else ""


def _constant_elsewhere(node: Node, device: torch.device) -> str:
    """Constants have no recorded value."""
    if node.op != "get_attr":
        return ""
    found: Any = getattr(node.graph.owning_module, str(node.target), None)
    wrong = isinstance(found, Tensor) and found.device != device
    return f"a constant is on {found.device}, not on {device}" if wrong else ""


RULES: Sequence[Rule] = (_foreign, _asks_for_data, _selects_by_mask, _elsewhere, _constant_elsewhere)


OUTSIDE = (
    "a process group exists, and the call is not one of DistributedDataParallel: who reduces gradients, and when "
    "parameters move, is unknown"
)
STATIC = "static_graph=True: DistributedDataParallel counts the gradients of each parameter, and a recording has others"
MIXED = "DistributedDataParallel casts the parameters itself (mixed_precision), and frees the casts between calls"


def why_not_with_ranks(model: nn.Module | None) -> str:
    """Return why nothing of ``model`` is recorded in this process; "" if something may be."""
    if model is None or not has_process_group():
        return ""
    for name, part in model.named_modules():
        if is_fsdp(part) or getattr(part, "_is_fsdp_managed_module", False):
            return f"FSDP shards {name or 'the model'}: its parameters come and go"
        if isinstance(part, nn.SyncBatchNorm):
            return f"{name or 'the model'} communicates between ranks: SyncBatchNorm"
    ddp = surrounding_ddp()
    if ddp is None:
        return OUTSIDE
    if getattr(ddp, "static_graph", False):
        return STATIC
    return MIXED if getattr(ddp, "mixed_precision", None) is not None else ""


PARTLY = "some outputs do not lead to all trained inputs: a loss may leave these out, which must then get no gradient"


def why_not_partly(flat: Flat) -> str:
    """Return why a graph is not recorded some of whose outputs do not reach all arguments that others reach.

    DistributedDataParallel, hooks, and what computed an argument see which gradients come.
    """
    count = sum(steps is not None for steps in flat.pattern)
    if flat.backward is None or count < 2:
        return ""
    reached = _seeds_reached(flat.backward.graph, count)
    found: dict[int, int] = {}
    for i, grad in zip(flat.routes, _results(flat.backward.graph), strict=True):
        found[i] = found.get(i, 0) | (reached[grad] if isinstance(grad, Node) else 0)
    return "" if all(seeds in (0, 2**count - 1) for seeds in found.values()) else PARTLY


def _seeds_reached(graph: Graph, count: int) -> dict[Node, int]:
    """Return for each node the outputs' gradients that it depends on, as a bit mask."""
    seeds = graph.find_nodes(op="placeholder")[-count:]
    found = {node: 1 << n for n, node in enumerate(seeds)}
    for node in graph.nodes:
        if node not in found:
            found[node] = 0
            for given in node.all_input_nodes:
                found[node] |= found[given]
            if isinstance(node.target, OpOverload) and is_mutable(node.target):
                found |= dict.fromkeys(node.all_input_nodes, found[node])
    return found


def _results(graph: Graph) -> Sequence[Any]:
    results: Any = graph.output_node().args[0]
    return results if isinstance(results, Sequence) else (results,)
