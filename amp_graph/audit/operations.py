"""Sees the operations of a step as they run: their dtypes, their module, and the user's line; in backward, too.

Before: ``F.linear(x, w)`` under ``torch.autocast``. After: two calls of ``aten._to_copy`` that autocast made, and one
of ``aten.addmm`` in bfloat16, in module ``encoder.0.fc`` at ``train.py:42``.

A dispatch mode sees them below autograd and autocast. Who made a cast is read off the caller: autocast casts inside of
the call that then computes, a user's ``x.to(dtype)`` is a call of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from amp_graph.audit.events import Tell as Heard
from amp_graph.audit.records import (
    CONVERSION,
    NOWHERE,
    Call,
    Place,
    Totals,
    Training,
    Watcher,
    dtype_name,
    tensors_in,
)
from amp_graph.audit.speed.model_sketch import call_of
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
from amp_graph.passes.torch_compat.dispatch import OpOverload, TorchDispatchMode, is_wrapper
from amp_graph.passes.torch_compat.storage import Memory, storage_key
from amp_graph.run.call_site import caller_of_torch

DEVICES = ("cpu", "cuda")
_ATEN = torch.ops.aten
OF_CPU = {  # torch has no formula for these
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
CALL = torch.nn.Module.__call__.__code__
ENGINE = "torch.autograd.graph"  # whose function runs backward, in this thread
DYNAMO = ("torch._dynamo", "torch._compile")
Tell = Callable[[Callable[[Watcher], None]], None]


class Operations(TorchDispatchMode):
    """The mode of one looked-at step; ``tell`` tells each watcher of an operation, before it and when it ran.

    ``heard`` gets the calls of outermost modules, as an event.
    """

    supports_higher_order_operators = True

    def __init__(self, training: Training, tell: Tell, heard: Heard) -> None:
        super().__init__()
        self.training, self.places, self.tell, self.heard = training, training.places, tell, heard
        self.updates = 0  # optimizers' steps that are running
        self.is_training = False  # whether it has seen the call of a model, a backward or a product
        self.is_paused = False  # while watchers work, or a TrainStep does
        self.is_over = False  # whether it has seen the call of a model that it was to see, in evaluation
        self.ran_graph = False  # whether a TrainStep did
        self._outermost: tuple[int, ...] = ()  # the call of a model that runs
        self._names = {key: name for one in list(training.models) for key, name in training.module_names(one).items()}
        training.list_weights()
        self._forward: dict[int, tuple[str, Place]] = {}  # by the number of the node in autograd's graph
        self._group: tuple[Any, ...] = ()  # the call of torch that dispatched the last operation
        self._casts: list[tuple[Call, int]] = []  # in that group so far, with their bytes
        self._saved: Memory[bool] = Memory()  # of the activations that were counted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: its operations are not seen."""
        return True

    def __exit__(self, *error: Any) -> None:
        """Look no more."""
        super().__exit__(*error)
        self._end_group(computes=False)
        self._see_model(None)

    # -- modules --------------------------------------------------------------------------------------

    def _module_of(self, frame: FrameType | None, operator: str) -> str | None:
        """Return the path of the innermost module that runs, None outside of any; in backward, of those it calls.

        Read off the frames: with hooks on all modules, torch.compile would warn, and compile again.
        """
        calls: list[FrameType] = []  # of modules, the innermost first
        inner = None
        below = False  # the engine that runs backward: checkpoints call modules again above it
        while frame is not None:
            if frame.f_code is CALL:
                calls.append(frame)
                inner = inner or (None if below else frame)
            below = below or frame.f_globals.get("__name__") == ENGINE
            frame = frame.f_back
        outer = calls[-1] if calls else None
        self._see_model(outer, begins=operator != CONVERSION)  # autocast casts weights with gradients enabled
        if inner is None or outer is None:
            return None
        module = inner.f_locals["self"]
        if id(module) not in self._names:
            self._add_model(outer.f_locals["self"])
        return self._names.get(id(module), type(module).__name__)

    def _see_model(self, frame: FrameType | None, *, begins: bool = True) -> None:
        """Tell of the end of one call of a model, and of the beginning of another; ``frame``: of the one that runs.

        A call is the ``id`` of its frame, which would keep the arguments alive, where it stands in its caller, and the
        model: the next frame may get the same one, in a loop over models too.
        """
        running: tuple[int, ...] = ()
        if frame is not None:
            running = id(frame), frame.f_back.f_lasti if frame.f_back is not None else 0, id(frame.f_locals["self"])
        if self._outermost not in ((), running):
            self._outermost = ()
            self.heard("model.call", {}, sys._getframe(1), True, None)
        if frame is None or self._outermost or not begins or in_backward():
            return
        self._outermost, self.is_training = running, True
        model, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
        if id(model) not in self._names:
            self._add_model(model)
        if torch.is_grad_enabled():
            call = call_of(args, kwargs)
            if (known := self.training.model_calls.setdefault(model, call)) is not call:
                known.calls += 1
        self.heard("model.call", {"self": model, "args": args}, frame.f_back or frame, False, None)

    def _add_model(self, model: torch.nn.Module) -> None:
        self.training.add_model(model)
        self._names |= self.training.module_names(model)
        self.training.list_weights()

    # -- what backward will read ----------------------------------------------------------------------

    def count_saved(self, results: Any) -> None:
        """Count the activations that the graph behind ``results`` keeps for its backward, each once."""
        if not self._saved:  # of this step, not of the one before
            self.training.saved.clear()
        for node in nodes_behind(t.grad_fn for t in tensors_in(results)):
            module, _ = self._forward.get(sequence_number(node), ("", NOWHERE))
            for t in saved_by(node):
                known = self.training.weights.known(t) is not None or self._saved.known(t) or storage_key(t) is None
                if t.is_floating_point() and not known:
                    self._saved.keep(t, known=True)
                    self.training.saved[module, dtype_name(t.dtype)] += t.nbytes

    # -- operations -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and tell of it."""
        kwargs, name = kwargs or {}, str(func)
        if self.is_paused or self.is_over or name.startswith("profiler."):
            return func(*args, **kwargs)
        with Attempt() as seeing:
            given = tensors_in((args, kwargs))
            call = self._call_of(name, given, sys._getframe(1))
            if isinstance(func, OpOverload) and is_mutable(func):
                self._tell(lambda watcher: watcher.before(call, func, args, kwargs), func, given)
        result = func(*args, **kwargs)
        with Attempt() as counting:
            if seeing.error is None:
                self._count(call, func, args, kwargs, result, given)
        if (error := seeing.error or counting.error) is not None:
            self.training.unseen[f"{func}: {type(error).__name__}: {error}"] = None
        return result

    def _call_of(self, operator: str, tensors: list[Tensor], frame: FrameType | None) -> Call:
        # Torch runs a mode's methods inside of a function of Dynamo's.
        while frame is not None and frame.f_globals.get("__name__", "").startswith(DYNAMO):
            frame = frame.f_back
        region = self.training.open[-1] if self.training.open else -1
        self.training.records = torch.is_grad_enabled()
        given = tuple([dtype_name(t.dtype) for t in tensors if t.is_floating_point()])
        module = self._module_of(frame, operator)
        if module is None and in_backward():
            number = running_sequence_number()
            path, place = self._forward.get(number, ("", NOWHERE))
            self._begin_group(("backward", number))
            return Call(operator, path, place, "backward", given, "", region)
        path, place = module or "", self.places.of(frame)
        library = self.places.library_of(frame) if operator == CONVERSION else ""
        outer = caller_of_torch(frame)  # frames of functions that hand calls on have one address, one after the other
        self._begin_group((id(outer), None if outer is None else outer.f_lasti))
        # The first one that meets a number made its node; those that make none meet that of the node before.
        self._forward.setdefault(next_sequence_number() - 1, (path, place))
        phase = "update" if self.updates and not self.training.records else "forward"  # a closure's has gradients
        return Call(operator, path, place, phase, given, "", region, "", library)

    def _count(self, call: Call, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> None:
        results = tensors_in(result)
        output = next((dtype_name(t.dtype) for t in results if t.is_floating_point()), "")
        call = Call(*call[:5], output, *call[6:])  # _replace takes three times as long
        moved = sum([t.numel() * t.element_size() for t in (*given, *results)])
        if call.operator == CONVERSION and call.inputs and call.output not in ("", call.inputs[0]):
            self._casts.append((call, moved))
        else:
            self._end_group(computes=True)
            self._add(call, moved, _flops(func, args, kwargs, result))
        self._tell(lambda watcher: watcher.ran(call, func, args, kwargs, result), func, [*given, *results])

    def _add(self, call: Call, moved: int, flops: int = 0) -> None:
        self.is_training = self.is_training or flops > 0 or call.phase == "backward"
        totals = self.training.calls.get(call) or self.training.calls.setdefault(call, Totals())
        totals.calls, totals.bytes, totals.flops = totals.calls + 1, totals.bytes + moved, totals.flops + flops

    def _begin_group(self, group: tuple[Any, ...]) -> None:
        if group != self._group:
            self._end_group(computes=False)
            self._group = group
            self.training.group += 1

    def _end_group(self, *, computes: bool) -> None:
        """Count the casts of the present call of torch, which goes on to compute, or not."""
        for call, moved in self._casts:
            made_by, library = ("autocast", "") if computes and call.region >= 0 else ("user", call.library)
            self._add(call._replace(cast=made_by if call.phase == "forward" else "", library=library), moved)
        self._casts.clear()

    def _tell(self, tell: Callable[[Watcher], None], func: Any, tensors: list[Tensor]) -> None:
        """Tell watchers, who may read values, of operators on plain tensors with memory; others are only counted."""
        if not isinstance(func, OpOverload):
            return
        for t in tensors:
            if is_wrapper(t) or t.is_meta or t.layout is not torch.strided:
                return
        with self.watching():
            self.tell(tell)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let watchers work: autocast, autograd and this mode leave alone what they do."""
        on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        before, self.is_paused = self.is_paused, True
        for device in on:
            torch.set_autocast_enabled(device, False)
        try:
            with torch.no_grad():
                yield
        finally:
            for device in on:
                torch.set_autocast_enabled(device, True)
            self.is_paused = before


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a matrix product, a convolution or an attention, 0 of anything else."""
    packet = getattr(func, "overloadpacket", func)
    count = flop_registry.get(OF_CPU.get(packet, packet))
    if packet is _ATEN._grouped_mm:  # a group for some of its columns, where the first operand has more dimensions
        return 2 * args[0].numel() * args[1].shape[-1] // (args[0].shape[0] if args[0].dim() > args[1].dim() else 1)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
