"""A stand-in for CUDA graphs on the CPU, at least as unforgiving as they are.

It runs a function once to learn its operations, and undoes what that wrote. A replay runs them again on the memory that
they were recorded with: the arguments' addresses at that time. What they made is overwritten with garbage before.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.replay import recorder
from amp_graph.replay.recorder import CannotRecord

GARBAGE = -77_777  # as an index, out of range


class Log(TorchDispatchMode):
    """Notes each operation with its arguments and results; refuses what waits, as a stream does that is captured."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise CannotRecord(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        before = {storage_key(t) for t in tensors_in((args, kwargs))}
        found = func(*args, **kwargs)
        new = [t.data for t in tensors_in(found) if storage_key(t) not in before]
        given = tree_map_only(Tensor, lambda t: t.data, (args, kwargs))
        self.calls.append((func, given, found, new, before))
        return found

    def run_again(self):
        """Run all operations on the memory of the first time, and write their results where those lie."""
        for func, (args, kwargs), _, new, before in self.calls:
            again = [t for t in tensors_in(func(*args, **kwargs)) if storage_key(t) not in before]
            for place, result in zip(new, again, strict=True):
                unexpanded(place).copy_(unexpanded(result))


def tensors_in(values):
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def unexpanded(tensor):
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def poison(tensors):
    """Overwrite memory with garbage, whatever views of it there are."""
    for t in tensors:
        if not isinstance(t, Tensor) or not t.numel():
            continue
        bare = unexpanded(t.data)
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
        held = [a.data for a in args if isinstance(a, Tensor)]  # the memory, without its version counter
        before = [a.clone() for a in held]
        with torch.random.fork_rng(devices=[]), Log() as log:
            results = run(*args)
        self.seen += [r for r in results if isinstance(r, Tensor)]
        for a, old in zip(held, before, strict=True):
            if not torch.equal(a.nan_to_num(), old.nan_to_num()):
                a.copy_(old)

        def replay():
            self.replayed += 1
            poison([t for call in log.calls for t in call[3]])
            with torch.no_grad():
                log.run_again()

        return replay, list(results)


def install(monkeypatch):
    """Let models on the CPU be recorded by the stand-in; return the list of recorders."""
    monkeypatch.setitem(recorder.RECORDERS, "cpu", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn
