"""A training step recorded once as a CUDA graph, and replayed: one launch instead of one a kernel.

Before: ``run(*args)`` at every step. After: a few steps as they are, one recording, and from then on the batch is
copied into the memory that was recorded, and all kernels follow. Source: torch/cuda/graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.storage import address_of

WARM_UP = 3  # steps before recording, as torch.cuda.make_graphed_callables has: libraries allocate, kernels are chosen
Run = Callable[..., Any]


@dataclass(eq=False)
class Replayed:
    """What runs a step's graph: as it is at first, then by replay.

    ``batch``: the places of the arguments that differ from call to call, which are copied; all others are read and
    written where they are, and are recorded anew where they have moved. ``returned``: how many results outlive the
    next call, and are copied out; the others are the graph's own memory.
    """

    run: Run
    batch: tuple[int, ...]
    returned: int
    calls: int = 0
    written: set[int] = field(default_factory=set)  # places in the batch that a step writes to
    recorded: Recorded | None = None

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        if self.calls < WARM_UP:
            self.calls += 1
            return self._warm_up(args)
        if self.recorded is None or self.recorded.addresses != self._addresses(args):
            self.recorded = self._record(args)
        return self._replay(self.recorded, args)

    def _warm_up(self, args: Sequence[Any]) -> Any:
        before = [args[i]._version for i in self.batch]
        found = on_side_stream(self.run, args)
        self.written |= {i for i, version in zip(self.batch, before, strict=True) if args[i]._version != version}
        return found

    def _record(self, args: Sequence[Any]) -> Recorded:
        self.recorded = None  # its memory is free again before there is more
        static = list(args)
        for i in self.batch:
            static[i] = torch.empty_like(args[i]).copy_(args[i])
        try:
            replay, outputs = record(self.run, static)
        except RuntimeError as error:
            raise CaptureError(
                f"TrainStep: this step cannot be recorded as a CUDA graph: {str(error).strip().splitlines()[0]}\n"
                "  legal: a step that copies nothing between host and device, and decides nothing by values\n"
                "  fix:   cuda_graph=False"
            ) from error
        return Recorded(replay, static, outputs, self._addresses(args))

    def _replay(self, recorded: Recorded, args: Sequence[Any]) -> Any:
        for i in self.batch:
            recorded.static[i].copy_(args[i])
        recorded.replay()
        for i in self.written:
            args[i].copy_(recorded.static[i])
        kept = [o.clone() if isinstance(o, Tensor) else o for o in recorded.outputs[: self.returned]]
        return (*kept, *recorded.outputs[self.returned :])

    def _addresses(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(address_of(a) for i, a in enumerate(args) if isinstance(a, Tensor) and i not in self.batch)


@dataclass(frozen=True)
class Recorded:
    """One recording: what replays it, and the memory that it reads and writes."""

    replay: Callable[[], None]
    static: list[Any]
    outputs: Sequence[Any]
    addresses: tuple[int, ...]


def on_side_stream(run: Run, args: Sequence[Any]) -> Any:
    """Call ``run`` where recordings are made, too: not on the default stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(*args)
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in found:
        if isinstance(tensor, Tensor):
            tensor.record_stream(torch.cuda.current_stream())
    return found


def record(run: Run, args: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
    """Record a call without running it; return what replays it, and the results that each replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*args)
    return graph.replay, outputs


def check_cuda_graph(asked: bool, model: torch.nn.Module, ranks: object) -> None:
    """Raise CaptureError where a step that is to be replayed is not on a CUDA device, or is one of several ranks."""
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
