"""A stand-in for CUDA graphs on the CPU, at least as unforgiving as they are.

It runs a function once to learn its results, undoes what that wrote, and keeps the results' memory. A replay runs the
function again on the memory that it was recorded with: the arguments' addresses at that time. What a recording
may overwrite, its results, is overwritten with garbage before each replay.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_graph.replay import recorder
from amp_graph.replay.recorder import CannotRecord

GARBAGE = -77_777  # as an index, out of range


class NoWaiting(TorchDispatchMode):
    """Refuses what waits for the device, as a stream does that is being captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise CannotRecord(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **kwargs or {})


def poison(tensors):
    """Overwrite memory with garbage, whatever views of it there are."""
    for t in tensors:
        if not isinstance(t, Tensor) or not t.numel():
            continue
        alias = t.detach()
        bare = alias.data
        for dim, step in enumerate(bare.stride()):
            if step == 0 and bare.shape[dim] > 1:
                bare = bare.narrow(dim, 0, 1)
        if bare.dtype == torch.bool:
            bare.logical_not_()
        else:
            bare.fill_(torch.nan if bare.is_floating_point() or bare.is_complex() else GARBAGE % 120)


class StandIn:
    """Records for one slot; ``made`` lists all of them."""

    made: ClassVar = []
    fails: ClassVar = ""  # a reason: recordings fail

    def __init__(self, device):
        StandIn.made.append(self)
        self.recorded = self.replayed = 0
        self.seen = []  # all memory of its recordings

    def record(self, run, args):
        if StandIn.fails:
            raise CannotRecord(StandIn.fails)
        self.recorded += 1
        held = [a.data if isinstance(a, Tensor) else a for a in args]  # the memory, without its version counter
        before = [a.clone() if isinstance(a, Tensor) else None for a in held]
        with torch.random.fork_rng(devices=[]), NoWaiting():
            found = run(*held)
        results = [f.data.clone(memory_format=torch.preserve_format) if isinstance(f, Tensor) else f for f in found]
        self.seen += [r for r in results if isinstance(r, Tensor)]
        for a, old in zip(held, before, strict=True):
            if isinstance(a, Tensor) and not torch.equal(a.nan_to_num(), old.nan_to_num()):
                a.copy_(old)

        def replay():
            self.replayed += 1
            poison(results)
            with torch.no_grad(), NoWaiting():
                again = run(*held)
            for place, new in zip(results, again, strict=True):
                if isinstance(place, Tensor):
                    place.copy_(new)

        return replay, results


def install(monkeypatch):
    """Let models on the CPU be recorded by the stand-in; return the list of recorders."""
    monkeypatch.setitem(recorder.RECORDERS, "cpu", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn
