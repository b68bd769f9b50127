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
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from amp_graph.passes.graph.node_info import calls_torch, draws, is_higher_order, schema_arguments, written_arguments
from amp_graph.passes.torch_compat.autograd import nodes_behind, outer_saved_tensors_hooks
from amp_graph.passes.torch_compat.dispatch import PLAIN, OpOverload, TorchDispatchMode
from amp_graph.passes.torch_compat.modules import is_fsdp, surrounding_ddp
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.passes.weights.batch_weight_casts import has_process_group
from amp_graph.replay.recorder import RECORDERS, CannotRecord

KNOWN = frozenset(("aten", "prims", "amp_graph", "mkldnn", "torchvision"))  # operators that only launch kernels
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "c10d_functional", "_dtensor"))
# Their CUDA kernels read a value on the host; torch has no tag for that.
WAITS = frozenset(
    "_linalg_check_errors linalg_eig _linalg_eigh _linalg_svd linalg_lstsq _ctc_loss _use_cudnn_ctc_loss "
    "repeat_interleave histc bincount".split()
)
CHANGES_MEMORY = frozenset("set_ resize_ resize_as_ record_stream".split())


def why_not_captured(gm: GraphModule, args: Sequence[Any]) -> str:
    """Return why a captured graph cannot be recorded, read off it before it is recorded; "" if nothing says so."""
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
    return ""


class Watch(TorchDispatchMode):
    """Refuses what must not be recorded on ``device``, operation by operation; ``written``: the memory that is written.

    draws: whether random numbers may be drawn: not in backward, nor inside of a checkpoint, which runs again there.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, *, draws: bool) -> None:
        super().__init__()
        self._device, self._draws = device, draws
        self.written = set[int | None]()  # storages, by their identity

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run``, watched."""

        def watched(*args: Any) -> Any:
            with self:
                return run(*args)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation. Raises CannotRecord, before it runs where that can be told."""
        kwargs = kwargs or {}
        if why := _foreign(func) or self._why_not(func, schema_arguments(func, args, kwargs)):
            raise CannotRecord(why)
        self._look_at(func, (args, kwargs))
        result = func(*args, **kwargs)
        self._look_at(func, result)
        return result

    def _why_not(self, func: OpOverload, given: dict[str, Any]) -> str:
        name = func._schema.name.partition("::")[2]
        if torch.Tag.data_dependent_output in func.tags or name in WAITS:
            return f"{name} waits for a value of the device"
        if torch.Tag.dynamic_output_shape in func.tags:
            return f"the shape of {name}'s result depends on data"
        if name in CHANGES_MEMORY:
            return f"{name} changes memory that a recording would go on using"
        if "index_put" in name and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(given["indices"])):
            return "a mask selects what is written"  # its elements are counted on the host
        if draws(func, given) and not (self._draws and outer_saved_tensors_hooks() is None):
            return "backward draws random numbers, as a checkpoint does that runs forward again"
        self.written.update(storage_key(t) for t in _tensors([given[n] for n in written_arguments(func)]))
        asked = given.get("device") or self._device  # perhaps without a number
        return "" if asked.type == self._device.type else f"{func} is on {asked}, not on {self._device}"

    def _look_at(self, func: OpOverload, given: Any) -> None:
        for tensor in _tensors(given):
            if tensor.device != self._device:
                raise CannotRecord(f"{func} is on {tensor.device}, not on {self._device}")


def _tensors(given: Any) -> list[Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, Tensor)]


def _foreign(func: Any) -> str:
    if not isinstance(func, OpOverload):
        return f"it calls {func}, which holds code of its own"
    if func.namespace in COLLECTIVES:
        return f"it communicates between ranks: {func}"
    if func.namespace not in KNOWN:
        return f"it calls {func}, a custom operator, which may do more than launch kernels"
    return ""


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


def inputs_behind(outputs: Sequence[Tensor]) -> set[int]:
    """Return the ids of the leaves to which ``outputs`` lead; raises CannotRecord where not all lead to the same ones.

    DistributedDataParallel, hooks, and what computed an argument see which gradients come.
    """
    reached = [{id(n.variable) for n in nodes_behind([out.grad_fn]) if hasattr(n, "variable")} for out in outputs]
    if any(one != reached[0] for one in reached):
        raise CannotRecord(PARTLY)
    return reached[0] if reached else set()
