"""One recorded forward with its backward, and the memory that both own: a slot.

Before: a forward whose saved values autograd owns. After: forward recorded under autograd, whose saved values are the
slot's, so that no other forward may use it until the backward of this one has run, or can no longer run. Backward is
autograd's, over that one graph of its own: recorded, or operation by operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import nodes_behind, saved_by
from amp_graph.passes.torch_compat.operators import foreach_copy_
from amp_graph.passes.torch_compat.storage import address_of, bytes_of, storage_key
from amp_graph.replay.eligibility import Watch, inputs_behind
from amp_graph.replay.recorder import CannotRecord, CudaRecorder

# The strides of the gradient that each differentiable output receives; None for an output that receives none.
Pattern = tuple[tuple[int, ...] | None, ...]
Gradients = Sequence[Tensor | None]


class Recording:
    """A recorded run, and the arguments as it reads them: ``static``, and what it returned: ``results``.

    They are copies of what the caller passes, numbered ``by_copy``, and all others by address; with version counters of
    their own, as replays count no write.
    """

    def __init__(
        self, run: Callable[..., Any], args: Sequence[Any], by_copy: Sequence[int], recorder: CudaRecorder
    ) -> None:
        """Record ``run``; raises CannotRecord."""
        self.by_copy, copies, grad = by_copy, set(by_copy), torch.is_grad_enabled()
        self.static = [
            (copied(a.detach()) if i in copies else a.data).requires_grad_(grad and a.requires_grad)
            if isinstance(a, Tensor)
            else a
            for i, a in enumerate(args)
        ]
        self._by_address = [i for i, a in enumerate(args) if isinstance(a, Tensor) and i not in copies]
        self._addresses = addresses_of(args, self._by_address)
        self.replay, self.results = recorder.record(run, self.static)

    def is_for(self, args: Sequence[Any]) -> bool:
        """Say whether the arguments that are not copied lie where they were recorded."""
        return addresses_of(args, self._by_address) == self._addresses

    def replay_on(self, args: Sequence[Any]) -> None:
        """Replay on ``args``, which fills ``results``."""
        for i in self.by_copy:
            fill(self.static[i], args[i])
        self.replay()


class Slot(Recording):
    """Recordings of one captured graph, for arguments of one kind; what is not copied of them are the model's tensors.

    new: the new tensors among the outputs, of which ``trained``, by number, have gradients. routes: the arguments that
    get these. kept: those that autograd has saved. written: those that forward writes to. holder: the call that waits
    for its backward.
    """

    def __init__(
        self, run: Callable[..., Any], args: Sequence[Any], by_copy: Sequence[int], recorder: CudaRecorder
    ) -> None:
        """Record forward; raises CannotRecord."""
        tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.recorder, self.device = recorder, args[tensors[0]].device
        watch = Watch(self.device, draws=True)
        super().__init__(watch.around(run), args, by_copy, recorder)
        memory = {i: storage_key(self.static[i]) for i in tensors}
        self.written = [i for i, key in memory.items() if key in watch.written]
        if set(by_copy).intersection(self.written):
            raise CannotRecord("it writes to an input that belongs to the caller")
        self._read(set(memory.values()))
        self.trained = [n for n, t in enumerate(self.new) if t.requires_grad]
        ends = inputs_behind([self.new[n] for n in self.trained])
        self.routes = [i for i in tensors if id(self.static[i]) in ends]
        if len(self.routes) < len(ends):
            raise CannotRecord("it holds a tensor that has a gradient, as a constant")
        self.saved = [t for node in nodes_behind(t.grad_fn for t in self.new) for t in saved_by(node)]
        saved = set(map(storage_key, self.saved))
        self.kept = [i for i, key in memory.items() if key in saved]
        self.backwards: dict[Pattern, Recording | None] = {}
        self.holder: weakref.ref[Any] | None = None

    def _read(self, memory: set[int | None]) -> None:
        """Note which outputs are new tensors, and how to find each in the new ones, or else in the arguments."""
        own = {id(a): i for i, a in enumerate(self.static) if isinstance(a, Tensor)}
        new: dict[int, Tensor] = {}
        for result in self.results:
            if isinstance(result, Tensor) and id(result) not in own and id(result) not in new:
                key = storage_key(result)
                if key is None:
                    raise CannotRecord("an output is not an ordinary tensor")
                if key in memory:
                    raise CannotRecord("an output shares memory with an input or with another output")
                memory.add(key)
                new[id(result)] = result
        self.new, numbers = list(new.values()), {key: n for n, key in enumerate(new)}
        self._outputs = [(own.get(id(r)), numbers.get(id(r)), r) for r in self.results]

    def arranged(self, new: Sequence[Tensor], args: Sequence[Any]) -> list[Any]:
        """Return the outputs in the captured graph's order: new tensors, arguments, and constants."""
        return [
            args[given] if given is not None else new[made] if made is not None else constant
            for given, made, constant in self._outputs
        ]

    @property
    def is_free(self) -> bool:
        """Whether no call waits for its backward."""
        return self.holder is None or self.holder() is None

    def forward(self, args: Sequence[Any]) -> list[Tensor]:
        """Replay forward on ``args``; return copies of the new tensors."""
        self.replay_on(args)
        for i in self.written:
            if not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        return copies(self.new)

    def backward(self, given: Gradients) -> Gradients | None:
        """Replay backward; return copies of the gradients, or None if it is not recorded. Raises CannotRecord."""
        pattern = tuple(None if g is None else tuple(g.stride()) for g in given)
        if pattern not in self.backwards:
            self.backwards[pattern] = None  # if recording fails
            self.backwards[pattern] = self._record_backward(given)
        recorded = self.backwards[pattern]
        if recorded is None:
            return None
        recorded.replay_on([g for g in given if g is not None])
        return copies(recorded.results)

    def _record_backward(self, given: Gradients) -> Recording | None:
        seeds = [g for g in given if g is not None]
        if not seeds:
            return None
        trained = [n for n, grad in zip(self.trained, given, strict=True) if grad is not None]
        run = Watch(self.device, draws=False).around(partial(self._differentiate, trained))
        found = Recording(run, seeds, range(len(seeds)), self.recorder)
        if any(grad is not None and grad.layout is not torch.strided for grad in found.results):
            raise CannotRecord("a gradient is sparse")
        return found

    def _differentiate(self, trained: Sequence[int], *seeds: Tensor) -> Sequence[Any]:
        """Return the gradient of each route, from those of some new tensors; autograd keeps the graph."""
        outs, wanted = [self.new[n] for n in trained], [self.static[i] for i in self.routes]
        # A backward may run inside of a region.
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return torch.autograd.grad(outs, wanted, seeds, retain_graph=True, allow_unused=True)

    def unrecorded_backward(self, given: Gradients) -> Gradients:
        """Run backward on what the recorded forward saved, which stays as it is."""
        pairs = [(n, grad) for n, grad in zip(self.trained, given, strict=True) if grad is not None]
        if not pairs:
            return [None for _ in self.routes]
        found = self._differentiate([n for n, _ in pairs], *(grad for _, grad in pairs))
        own = set(map(storage_key, self.saved))
        return [g if g is None or storage_key(g) not in own else copied(g) for g in found]

    @property
    def bytes(self) -> int:
        """The bytes of all memory that the slot holds and Python can see."""
        found = [*(self.static[i] for i in self.by_copy), *self.new, *self.saved]
        for recorded in self.backwards.values():
            found += [*recorded.static, *recorded.results] if recorded else []
        own = {storage_key(self.static[i]) for i in self._by_address}
        sizes = {storage_key(t): bytes_of(t) for t in found if t is not None}  # shared memory once
        return sum(size for key, size in sizes.items() if key not in own)


def addresses_of(args: Sequence[Any], numbers: Sequence[int]) -> list[int]:
    """Return the addresses of the arguments of these numbers."""
    return [address_of(args[i]) for i in numbers]


def twin_of(tensor: Tensor) -> Tensor:
    """Return new memory with the sizes and strides of ``tensor``, which may be expanded."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def fill(twin: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``twin``, whose version counter stays."""
    _unexpanded(twin.data).copy_(_unexpanded(source))


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    made = twin_of(tensor)
    fill(made, tensor)
    return made


def copies(tensors: Sequence[Any]) -> list[Any]:
    """Return a copy of each tensor, each in memory of its own, with the same strides; None stays None.

    One call of torch copies all of one dtype, because a call for each would take the host longer than the kernels run.
    """
    found = []
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if tensor is None or not _is_dense(tensor):
            found.append(None if tensor is None else copied(tensor))
            continue
        made = torch.empty_like(tensor)
        targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
        targets.append(made)
        sources.append(tensor)
        found.append(made)
    for targets, sources in by_dtype.values():
        foreach_copy_(targets, sources)
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the elements of ``tensor`` fill their memory, in any order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with one element along each expanded dimension: the others are the same memory."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
