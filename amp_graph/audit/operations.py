"""Sees the operations of a step as they run: their dtypes, their module, and the user's line; in backward, too.

Before: ``F.linear(x, w)`` under ``torch.autocast``. After: two calls of ``aten._to_copy`` that autocast made, and one
of ``aten.addmm`` in bfloat16, in module ``encoder.0.fc`` at ``train.py:42``.

A dispatch mode sees them below autograd and autocast. Who made a cast is read off the caller: autocast casts inside of
the call that then computes, a user's ``x.to(dtype)`` is a call of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from amp_graph.audit.records import NOWHERE, Call, Place, Places, Totals, Training
from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.node_info import is_mutable
from amp_graph.passes.torch_compat.autograd import (
    in_backward,
    next_sequence_number,
    nodes_behind,
    running_sequence_number,
    saved_by,
    sequence_number,
)
from amp_graph.passes.torch_compat.dispatch import TorchDispatchMode, is_wrapper

CONVERSION = "aten._to_copy.default"
DEVICES = ("cpu", "cuda")
DTYPES = {one: str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
DYNAMO = ("torch._dynamo", "torch._compile")
Tell = Callable[[str, Call, Any, Sequence[Any], Mapping[str, Any], Any], None]


class Operations(TorchDispatchMode):
    """The mode of one looked-at step; ``tell`` gets "before" and "ran" of each operation."""

    supports_higher_order_operators = True

    def __init__(self, training: Training, places: Places, tell: Tell) -> None:
        super().__init__()
        self.training, self.places, self.tell = training, places, tell
        self.updates = 0  # optimizers' steps that are running
        self._modules: list[str] = []  # of running modules, the innermost last
        self._names = {key: name for one in list(training.models) for key, name in training.module_names(one).items()}
        self._forward: dict[int, tuple[str, Place]] = {}  # by the number of the node in autograd's graph
        self._group: tuple[Any, ...] = ()  # the call of torch that dispatched the last operation
        self._casts: list[tuple[Call, int]] = []  # in that group so far, with their bytes
        self._saved: set[int] = set()  # where the activations are that were counted
        self._hooks: list[Any] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: its operations are not seen."""
        return True

    def __enter__(self) -> Operations:
        """Begin to look."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Look no more."""
        super().__exit__(*error)
        self._end_group(computes=False)
        for hook in self._hooks:
            hook.remove()

    # -- modules --------------------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self.training.add_model(module)
            self._names |= self.training.module_names(module)
        self._modules.append(self._names[id(module)])

    def _leave_module(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._modules:
            self._modules.pop()

    # -- what backward will read ----------------------------------------------------------------------

    def count_saved(self, results: Any) -> None:
        """Count the activations that the graph behind ``results`` keeps for its backward, each once."""
        if not self._saved:  # of this step, not of the one before
            self.training.saved.clear()
        stored = {p.untyped_storage().data_ptr() for model in list(self.training.models) for p in model.parameters()}
        for node in nodes_behind(t.grad_fn for t in _tensors(results)):
            module, _ = self._forward.get(sequence_number(node), ("", NOWHERE))
            for t in saved_by(node):
                memory = t.untyped_storage().data_ptr()
                if t.is_floating_point() and memory not in stored and memory not in self._saved:
                    self._saved.add(memory)
                    self.training.saved[module, _dtype_name(t)] += t.numel() * t.element_size()

    # -- operations -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and tell of it."""
        kwargs, name = kwargs or {}, str(func)
        if name.startswith("profiler."):
            return func(*args, **kwargs)
        with Attempt() as seeing:
            given = _tensors((args, kwargs))
            call = self._call_of(name, given, sys._getframe(1))
            if is_mutable(func):
                self._tell("before", call, func, args, kwargs, None, given)
        result = func(*args, **kwargs)
        with Attempt() as counting:
            if seeing.error is None:
                self._count(call, func, args, kwargs, result, given)
        if (error := seeing.error or counting.error) is not None:
            self.training.unseen[f"{func}: {type(error).__name__}: {error}"] = None
        return result

    def _call_of(self, operator: str, tensors: list[Tensor], caller: FrameType | None) -> Call:
        frame = _outside_of_dynamo(caller)
        region = self.training.open[-1] if self.training.open else -1
        given = tuple([_dtype_name(t) for t in tensors if t.is_floating_point()])
        if in_backward() and not self._modules:
            number = running_sequence_number()
            module, place = self._forward.get(number, ("", NOWHERE))
            self._begin_group(("backward", number))
            return Call(operator, module, place, "backward", given, "", region)
        module, place = self._modules[-1] if self._modules else "", self.places.of(frame)
        self._begin_group((id(frame), None if frame is None else frame.f_lasti))
        # The first one that meets a number made its node; those that make none meet that of the node before.
        self._forward.setdefault(next_sequence_number() - 1, (module, place))
        return Call(operator, module, place, "update" if self.updates else "forward", given, "", region)

    def _count(self, call: Call, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> None:
        results = _tensors(result)
        output = next((_dtype_name(t) for t in results if t.is_floating_point()), "")
        call = Call(*call[:5], output, call.region)  # _replace takes three times as long
        moved = sum([t.numel() * t.element_size() for t in (*given, *results)])
        if call.operator == CONVERSION and call.inputs and call.output not in ("", call.inputs[0]):
            self._casts.append((call, moved))
        else:
            self._end_group(computes=True)
            self._add(call, moved, _flops(func, args, kwargs, result))
        self._tell("ran", call, func, args, kwargs, result, [*given, *results])

    def _add(self, call: Call, moved: int, flops: int = 0) -> None:
        totals = self.training.calls.get(call) or self.training.calls.setdefault(call, Totals())
        totals.calls, totals.bytes, totals.flops = totals.calls + 1, totals.bytes + moved, totals.flops + flops

    def _begin_group(self, group: tuple[Any, ...]) -> None:
        if group != self._group:
            self._end_group(computes=False)
            self._group = group

    def _end_group(self, *, computes: bool) -> None:
        """Count the casts of the present call of torch, which goes on to compute, or not."""
        for call, moved in self._casts:
            made_by = "autocast" if computes and call.region >= 0 else "user"
            self._add(call._replace(cast=made_by if call.phase == "forward" else ""), moved)
        self._casts.clear()

    def _tell(
        self, what: str, call: Call, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]
    ) -> None:
        """Tell watchers, who may read values, of plain tensors with memory."""
        for t in tensors:
            if is_wrapper(t) or t.is_meta or t.layout is not torch.strided:
                return
        on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        for device in on:
            torch.set_autocast_enabled(device, False)
        with torch.no_grad():
            self.tell(what, call, func, args, kwargs, result)
        for device in on:
            torch.set_autocast_enabled(device, True)


def _outside_of_dynamo(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called torch: torch runs a mode's methods inside of a function of Dynamo's."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(DYNAMO):
        frame = frame.f_back
    return frame


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator; ``tree_leaves`` takes several times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [t for value in values if value is not None for t in _tensors(value)]


def _dtype_name(tensor: Tensor) -> str:
    return DTYPES[tensor.dtype]


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a matrix product, a convolution or an attention, 0 of anything else."""
    packet = getattr(func, "overloadpacket", func)
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
