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
from amp_graph.replay.recorder import RECORDERS, CannotRecord
from amp_graph.replay.slots import Recording

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
    recording: Recording | None = None

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        if self.calls < WARM_UP:
            self.calls += 1
            return self._warm_up(args)
        if self.recording is None or not self.recording.is_for(args):
            self.recording = None  # free memory before the next recording allocates
            self.recording = self._recorded(args)
        self.recording.replay_on(args)
        for i in self.written:
            args[i].copy_(self.recording.static[i])
        found = self.recording.results
        kept = [o.clone() if isinstance(o, Tensor) else o for o in found[: self.returned]]
        return (*kept, *found[self.returned :])

    def _warm_up(self, args: Sequence[Any]) -> Any:
        before = [args[i]._version for i in self.batch]
        found = on_side_stream(self.run, args)
        self.written |= {i for i, version in zip(self.batch, before, strict=True) if args[i]._version != version}
        return found

    def _recorded(self, args: Sequence[Any]) -> Recording:
        device = next(a.device for a in args if isinstance(a, Tensor))
        try:
            return Recording(self.run, args, self.batch, RECORDERS[device.type](device))
        except CannotRecord as error:
            raise CaptureError(
                f"TrainStep: this step cannot be recorded as a CUDA graph: {error}\n"
                "  legal: a step without copies between host and device and without branches on tensor values\n"
                "  fix:   cuda_graph=False"
            ) from error


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
