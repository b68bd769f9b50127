"""Count the dtype conversions that a step executes, and the bytes it saves for backward.

    with CastCounter(model) as casts:
        loss = loss_fn(model(x))
        casts.phase = "backward"
        loss.backward()
    casts.forward_activation, casts.backward_gradient, casts.weight

All of it looks below autograd (`TorchDispatchMode`), where autocast's casts are ordinary operations and the
conversions that a kernel makes in its registers are not. Of inductor's code only the operations left
outside of its kernels are seen.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.torch_compat.storage import storage_of
from tests.measure_dtypes import CASTS, MOVES, Watch, op_name, tensors

# Autograd nodes that hand a weight's gradient on without computing: a cast of `w.t()` is a cast of w.
_VIEW_NODES = frozenset(
    f"{name}Backward{i}"
    for name in ("T", "View", "Transpose", "Permute", "Alias", "UnsafeView", "Unsqueeze", "Squeeze", "ToCopy")
    for i in (0, 1)
)


def _storage(t: torch.Tensor) -> StorageWeakRef:
    """Identify the memory of a tensor; while the reference is held, nothing new gets the same identity."""
    return StorageWeakRef(storage_of(t))


@dataclass(eq=False)
class Cast:
    """One executed conversion between two floating-point dtypes."""

    phase: str
    kind: str
    source: torch.dtype
    target: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    node: str
    storage: StorageWeakRef = field(repr=False)
    consumers: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        short = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}
        into = "+".join(dict.fromkeys(self.consumers)) or self.node or "-"
        return f"{self.kind}: {short[self.source]}->{short[self.target]}{list(self.shape)} for {into}"


class CastCounter(Watch):
    """Counts the dtype conversions of a forward and a backward, as "weight", "activation" or "gradient".

    A cast is a *weight* cast when its source lies in a parameter's storage (views of it included) or in
    that of an earlier weight cast's result, and, in backward, when it hands a gradient to a parameter: the
    autograd node that executes it leads to the parameter's accumulator through nothing but views, or its
    result's storage is found to be the parameter's `.grad` at the end (a cast inside of a custom function).
    Any other cast in forward is an *activation* cast, in backward a *gradient* cast.

    Storages are held by weak reference: a strong one would stop autograd from stealing gradients, and would
    add the copies it counts. Casts between complex numbers, or to and from integers, are not counted.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.phase = "forward"
        self.events: list[Cast] = []
        self._parameters = {id(p): p for p in model.parameters()} if model is not None else {}
        self._weights = {_storage(p) for p in self._parameters.values()}
        self._waiting: dict[StorageWeakRef, Cast] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = op_name(func)
        if name not in MOVES:
            for t in tensors((args, kwargs)):
                in_memory = t.layout is torch.strided  # what is packed for a kernel has no storage to know it by
                cast = self._waiting.get(_storage(t)) if self._waiting and in_memory else None
                if cast is not None and (cast.phase == "backward") == self._is_backward():
                    cast.consumers.append(name)
        for source, result in _conversions(name, args, out):
            self._record(source, result)
        return out

    def _record(self, source: torch.Tensor, result: torch.Tensor) -> None:
        backward = self._is_backward()
        node = torch._C._current_autograd_node()
        storage = _storage(result)
        if _storage(source) in self._weights:
            kind = "weight"
            self._weights.add(storage)
        elif backward:
            kind = "weight" if node is not None and self._leads_to_parameter(node) else "gradient"
        else:
            kind = "activation"
        size = source.numel() * source.element_size() + result.numel() * result.element_size()
        phase, ran_by = "backward" if backward else "forward", "" if node is None else node.name()
        cast = Cast(phase, kind, source.dtype, result.dtype, tuple(result.shape), size, ran_by, storage)
        self.events.append(cast)
        self._waiting[storage] = cast

    def _is_backward(self) -> bool:
        # A running backward counts whatever `phase` says, and so does what activation checkpointing
        # recomputes.
        return self.phase == "backward" or torch._C._current_graph_task_id() != -1

    def _leads_to_parameter(self, node: Any) -> bool:
        while node is not None and node.name() in _VIEW_NODES:
            node = node.next_functions[0][0]
            if hasattr(node, "variable"):
                return id(node.variable) in self._parameters
        return False

    def __exit__(self, *exc):
        super().__exit__(*exc)
        grads = {_storage(p.grad): p for p in self._parameters.values() if p.grad is not None}
        for cast in self.events:
            if cast.kind == "gradient" and cast.storage in grads and cast.shape == grads[cast.storage].shape:
                cast.kind = "weight"

    def of(self, phase: str | None = None, kind: str | None = None) -> list[Cast]:
        """The casts of one phase and kind, in order."""
        return [c for c in self.events if phase in (None, c.phase) and kind in (None, c.kind)]

    @property
    def forward_activation(self) -> int:
        return len(self.of("forward", "activation"))

    @property
    def backward_gradient(self) -> int:
        return len(self.of("backward", "gradient"))

    @property
    def weight(self) -> int:
        """Casts of weights in forward and of their gradients in backward, together."""
        return len(self.of(kind="weight"))

    @property
    def total(self) -> int:
        return len(self.events)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all casts, of contiguous operands."""
        return sum(c.bytes for c in self.events)

    def __str__(self) -> str:
        return (
            f"{self.total} casts, {self.bytes:,} bytes: {self.forward_activation} activation, "
            f"{self.backward_gradient} gradient, {self.weight} weight"
        )

    def table(self) -> str:
        """Every different cast with its count, the most frequent first."""
        counts = Counter(f"{c.phase} {c}" for c in self.events)
        return "\n".join(f"{n:4d}  {line}" for line, n in counts.most_common())


def _conversions(name: str, args: tuple, out: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(source, result) of every float-to-float conversion that this call made."""
    if name not in CASTS:
        return
    if name == "aten._foreach_copy_":
        pairs = list(zip(args[1], args[0], strict=True))
    else:
        pairs = [(args[1], args[0]) if name == "aten.copy_" else (args[0], out)]
    for source, result in pairs:
        if source.dtype != result.dtype and source.is_floating_point() and result.is_floating_point():
            yield source, result


def saved_bytes(fn: Callable[[], Any], model: nn.Module, *, weight_copies: bool = True) -> int:
    """Bytes that `fn` saves for backward, each storage once, without the model's parameters and buffers.

    Those exist anyway. `weight_copies=False` also leaves out what was cast from a parameter, now or in an
    earlier call, to see activations alone: a system that keeps such copies elsewhere would otherwise seem
    to save less.
    """
    known = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    converted = conversion_of(model)
    if not weight_copies and converted is not None and converted.captured.frozen is not None:
        known |= {_storage(t) for t in converted.captured.frozen.tensors if t.layout is torch.strided}
    sizes: dict[StorageWeakRef, int] = {}

    @torch._dynamo.disable
    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = _storage(t)
        if storage not in known:
            sizes[storage] = storage_of(t).nbytes()
        return t

    with CastCounter(model) as casts, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = fn()
    if not weight_copies:
        for storage in casts._weights:
            sizes.pop(storage, None)
    del result  # held until here: a storage freed before its size was summed would not be saved at all
    return sum(sizes.values())
