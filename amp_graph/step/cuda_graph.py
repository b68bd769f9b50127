"""Records a training step as a CUDA graph and replays it: one launch instead of one per kernel.

Before: ``run(*args)`` at every step. After: a few eager steps and one recording; from then on the batch is copied into
the recorded memory and the graph is replayed. Source: torch/cuda/graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.storage import address_of
from amp_graph.replay.recorder import RECORDERS, CannotRecord, CudaRecorder

WARM_UP = 3  # warm-up steps, as in torch.cuda.make_graphed_callables: libraries allocate and choose kernels
Run = Callable[..., Any]


@dataclass(eq=False)
class Replayed:
    """Runs a step's graph: eagerly at first, then by replay.

    ``batch``: the indices of arguments that change from call to call; they are copied. All others are read and written
    in place; if one moves, the step is recorded again. ``returned``: the number of results that must outlive the next
    call and are copied out; the others stay in the graph's own memory.
    """

    run: Run
    batch: tuple[int, ...]
    returned: int
    calls: int = 0
    written: set[int] = field(default_factory=set)  # indices of batch tensors that a step writes to
    recorder: CudaRecorder | None = None  # of the present recording; it owns the memory
    static: list[Any] = field(default_factory=list)  # the arguments as the recording reads them
    outputs: list[Any] = field(default_factory=list)  # as each replay fills them
    addresses: tuple[int, ...] = ()  # of the arguments that are not copied

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        if self.calls < WARM_UP:
            self.calls += 1
            return self._warm_up(args)
        addresses = tuple(address_of(a) for i, a in enumerate(args) if isinstance(a, Tensor) and i not in self.batch)
        if self.recorder is None or self.addresses != addresses:
            self._record(args)
            self.addresses = addresses
        for i in self.batch:
            self.static[i].copy_(args[i])
        self.replay()
        for i in self.written:
            args[i].copy_(self.static[i])
        kept = [o.clone() if isinstance(o, Tensor) else o for o in self.outputs[: self.returned]]
        return (*kept, *self.outputs[self.returned :])

    def _warm_up(self, args: Sequence[Any]) -> Any:
        before = [args[i]._version for i in self.batch]
        found = on_side_stream(self.run, args)
        self.written |= {i for i, version in zip(self.batch, before, strict=True) if args[i]._version != version}
        return found

    def _record(self, args: Sequence[Any]) -> None:
        self.recorder, self.static, self.outputs = None, [], []  # free memory before the next recording allocates
        static = list(args)
        for i in self.batch:
            static[i] = torch.empty_like(args[i]).copy_(args[i])
        device = next(a.device for a in args if isinstance(a, Tensor))
        recorder = RECORDERS[device.type](device)
        try:
            self.replay, self.outputs = recorder.record(self.run, static)
        except CannotRecord as error:
            raise CaptureError(
                f"TrainStep: this step cannot be recorded as a CUDA graph: {error}\n"
                "  legal: a step without copies between host and device and without branches on tensor values\n"
                "  fix:   cuda_graph=False"
            ) from error
        self.recorder, self.static = recorder, static


def on_side_stream(run: Run, args: Sequence[Any]) -> Any:
    """Call ``run`` on a side stream, as recordings do."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(*args)
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in found:
        if isinstance(tensor, Tensor):
            tensor.record_stream(torch.cuda.current_stream())
    return found


def check_cuda_graph(asked: bool, model: torch.nn.Module, ranks: object) -> None:
    """Raise CaptureError for a CUDA graph without a CUDA device, or with several ranks."""
    if not asked:
        return
    kinds = sorted({p.device.type for p in model.parameters()} - {"cuda"})
    if kinds:
        raise CaptureError(
            f"TrainStep: cuda_graph=True, and {type(model).__name__} has parameters on: {', '.join(kinds)}\n"
            "  legal: a model on a CUDA device\n  fix:   model.cuda(), or cuda_graph=False"
        )
    if ranks is not None:
        raise CaptureError(
            "TrainStep: cuda_graph=True, and gradients are averaged over several ranks, which is not recorded\n"
            "  legal: one process, or process_group=False\n  fix:   cuda_graph=False"
        )
