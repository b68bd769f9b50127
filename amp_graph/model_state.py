"""The state of a model that a measurement may write, so that it can be restored, and that of random number generators.

``with unchanged(model, batch): model(*batch)``: parameters, buffers, attributes, hooks and modes are as before
afterwards.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

CONVERSION = "_amp_graph"  # the attribute that marks a converted model
CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)  # those that forward may write to


class RandomState:
    """The states of the generators of torch, of all CUDA devices in use, of Python, and of NumPy where it is used."""

    def __init__(self) -> None:
        """Read them."""
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = numpy.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Set them."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


@dataclass(frozen=True)
class _Kept:
    """A tensor, its memory at the time (``alias``), a copy of its values, its flag and its gradient."""

    tensor: Tensor
    alias: Tensor
    values: Tensor
    requires_grad: bool
    grad: Tensor | None

    def restore(self) -> None:
        now = self.tensor
        if type(now) in (Tensor, Parameter) and not _is_same_memory(now, self.alias):
            now.data = self.alias
        if not _is_same(now, self.values):  # a write by .data leaves the version counter as it is
            with torch.inference_mode(now.is_inference()):
                now.detach().copy_(self.values)
        if now.requires_grad and not (now.is_leaf or now._is_view()):
            now.detach_()  # a write with history made it part of that history
        if now.requires_grad != self.requires_grad and now.is_leaf:
            now.requires_grad_(self.requires_grad)
        if now.is_leaf and now.grad is not self.grad:
            now.grad = self.grad


class Contents:
    """The tensors and containers that can be reached from some roots through containers, and what is in them."""

    def __init__(self, roots: Any, *, weights: bool = True) -> None:
        """Take the copies; without ``weights`` none of parameters, to which a write cannot be undone then.

        Of parameters on a GPU, they are in the host's memory, as a GPU may be full of them.
        """
        self._weights = weights
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[int, _Kept] = {}
        self._uncopied: list[tuple[Tensor, int]] = []  # parameters, or with history; and their version counters
        self._seen: set[int] = set()
        self._look(roots)

    def _look(self, found: Any) -> None:
        waiting = [found]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Tensor):
                self._keep(one)
            elif id(one) not in self._seen and type(one) in (*CONTAINERS, tuple):
                self._seen.add(id(one))
                items = list(one.values() if isinstance(one, dict) else one)
                if type(one) is not tuple:
                    self._containers.append((one, dict(one) if isinstance(one, dict) else items))
                waiting += items

    def _keep(self, tensor: Tensor) -> None:
        uncopied = tensor.requires_grad and not tensor.is_leaf  # a write to it is part of its history
        uncopied |= isinstance(tensor, Parameter) and not (self._weights or tensor.is_inference())
        if uncopied:
            self._uncopied.append((tensor, tensor._version))
        if id(tensor) in self._tensors or uncopied or is_lazy(tensor):
            return
        own = tensor.detach()
        on_host = isinstance(tensor, Parameter) and tensor.is_cuda
        values = own.to("cpu", copy=True) if on_host else own.clone()
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors[id(tensor)] = _Kept(tensor, own, values, tensor.requires_grad, grad)

    def is_lost(self) -> bool:
        """Return whether ``restore`` cannot undo all: what was not copied is written, or a write has a history."""
        views = (one.tensor for one in self._tensors.values() if one.tensor._is_view())
        return any(t._version != version for t, version in self._uncopied) or any(not t.is_leaf for t in views)

    def restore(self) -> None:
        """Undo what was written."""
        for container, kept in self._containers:
            _refill(container, kept)
        for one in self._tensors.values():
            one.restore()


class ModelState(Contents):
    """A model's parameters, buffers, attributes, hooks and modes, and the state of random number generators.

    Attributes: all of every module, the contents of lists, dicts and sets in them included; not those of other objects.
    ``given``: what the model is called with.
    """

    def __init__(self, model: torch.nn.Module, given: Any = (), *, weights: bool = True) -> None:
        """Take the snapshot; without ``weights`` parameters are not copied, see ``Contents``."""
        self._random = RandomState()
        self._modules = [(m, dict(m.__dict__)) for m in model.modules()]
        own = (list(attributes.values()) for _, attributes in self._modules)
        super().__init__([*own, given, tree_leaves(given)], weights=weights)

    def restore(self) -> None:
        """Undo what was written, and the use of random numbers."""
        for module, attributes in self._modules:
            _refill(module.__dict__, attributes)
        super().restore()
        self._random.restore()


@contextmanager
def restored(before: RandomState | Contents) -> Iterator[None]:
    """Restore what was taken ``before``, afterwards."""
    try:
        yield
    finally:
        before.restore()


def same_random_numbers() -> AbstractContextManager[None]:
    """Restore the state of all random number generators afterwards."""
    return restored(RandomState())


@contextmanager
def seeded() -> Iterator[None]:
    """Let all random number generators begin with the same state in each process; restore theirs afterwards."""
    with same_random_numbers():
        torch.manual_seed(0)
        random.seed(0)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed(0)
        yield


def unchanged(model: torch.nn.Module, given: Any = ()) -> AbstractContextManager[None]:
    """Restore ``ModelState`` afterwards."""
    return restored(ModelState(model, given))


def unwritten(given: Any) -> AbstractContextManager[None]:
    """Restore the tensors and containers in ``given`` afterwards, which a model may write to."""
    return restored(Contents([given, tree_leaves(given)]))


def _refill(container: Any, kept: Any) -> None:
    """Give a container the elements that it had, if it has others; the same objects in the same order."""
    now, before = (list(chain(*c.items()) if isinstance(c, Mapping) else c) for c in (container, kept))
    if len(now) != len(before) or any(map(is_not, now, before)):
        container.clear()
        (container.extend if isinstance(container, MutableSequence) else container.update)(kept)


def _is_same_memory(now: Tensor, alias: Tensor) -> bool:
    if now.is_meta or now.layout != torch.strided or alias.layout != torch.strided or now.is_nested:
        return True
    return now.dtype == alias.dtype and now.device == alias.device and now.is_set_to(alias)


def _is_same(now: Tensor, kept: Tensor) -> bool:
    """Say whether two tensors have the same values, NaN included; False as well where they cannot be compared."""
    mine = now.detach()
    if mine.is_meta:
        return True
    try:
        other = kept.to(mine.device)
        if torch.equal(mine, other):
            return True
        return bool(((mine == other) | ((mine != mine) & (other != other))).all())
    except (RuntimeError, TypeError):
        return False
