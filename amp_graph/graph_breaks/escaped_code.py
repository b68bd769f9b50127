"""Decides how a model's uncaptured code runs: under ``torch.autocast`` or in fp32, by the policy.

Before: ``print(x)`` in a converted ``forward``. After: that call runs in ``region()``, which is ``torch.autocast``
except for the modules that stay fp32, and ``finished`` restores the dtypes of its result.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.devices import device_of_model
from amp_graph.graph_breaks.fp32_modules import KeptModules, kept_in_fp32
from amp_graph.graph_breaks.run_under_autocast import autocast_region, is_of_precision
from amp_graph.graph_breaks.upcast_outputs import widened_outputs
from amp_graph.model_state import ModelState
from amp_graph.passes.autocast_regions.user_casts import METHODS, Conversions
from amp_graph.passes.torch_compat.autograd import users_functions
from amp_graph.passes.torch_compat.storage import StorageWeakRef, storage_key, storage_of
from amp_graph.policy import Policy

_here = threading.local()  # per thread: whether it is in a region, and which storages the user's code made low


class FailsUnderAutocast(Exception):
    """Uncaptured code failed under autocast and its writes were undone: it shall run in fp32."""


class NeedsFp32(Exception):
    """A partial graph has other results under autocast: the call shall run in fp32, and still can."""


class EscapedCode:
    """The uncaptured code of ``model``: under autocast, or in fp32. ``complain`` reports a change to the user."""

    def __init__(
        self, model: torch.nn.Module, policy: Policy, complain: Callable[[str, str], None] | None = None
    ) -> None:
        self.model, self.policy, self._complain = model, policy, complain
        self._kept: KeptModules | None = None
        self._works = False  # whether a call has run under autocast
        self._fails = False  # whether one has failed there, so that all now run in fp32

    @property
    def is_cast(self) -> bool:
        """Whether it runs under autocast."""
        device = device_of_model(self.model) or "cpu"
        return not self._fails and self.policy.runs_escaped(device) == "autocast"

    @property
    def asks_dtypes(self) -> bool:
        """Whether every capture is under autocast, as with lists that reproduce torch.autocast."""
        return self.is_cast and self.policy.op_list("cpu").unlisted != "opaque"

    def mode(self) -> tuple[bool, bool]:
        """Return what changes the code of a call more than its sizes do: training, and gradients."""
        return self.model.training, torch.is_grad_enabled()

    @property
    def how(self) -> str:
        """How it runs: "in fp32", or the autocast region."""
        if not self.is_cast:
            return "in fp32"
        kind, dtype = self.kind()
        return f"under torch.autocast({kind!r}, {dtype})"

    def kind(self) -> tuple[str, torch.dtype]:
        """Return the device and the dtype of the autocast region."""
        kind = device_of_model(self.model) or "cpu"
        return kind, self.policy.torch_dtype(kind)

    def look_again(self) -> None:
        """Find the modules that stay fp32 again."""
        self._kept = None

    @contextmanager
    def region(self) -> Iterator[tuple[str, torch.dtype]]:
        """Run uncaptured code as the policy says."""
        kind, dtype = self.kind()
        if self._kept is None:
            self._kept = KeptModules(kept_in_fp32(self.model, self.policy, kind), kind)
        outer = getattr(_here, "is_running", False)
        _here.is_running = True
        if not outer:
            _here.low = {}
        try:
            with self._kept.standing(), autocast_region(kind, dtype):
                yield kind, dtype
        finally:
            _here.is_running = outer

    @staticmethod
    def is_running() -> bool:
        """Return whether this thread runs uncaptured code of a converted model."""
        return bool(getattr(_here, "is_running", False))

    def finished(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast results back to fp32, except inputs, parameters and buffers; a backward runs as its forward did."""
        leaves = (tree_leaves(result), tree_leaves((args, kwargs)))
        results, inputs = ([t for t in some if isinstance(t, torch.Tensor)] for some in leaves)
        for node in users_functions(results, inputs):
            node.apply = _in_region(node, *self.kind())
        if not self.policy.keep_outputs:
            return result

        def own() -> set[int]:
            by_user = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and storage_key(t) in _here.low]
            given = tree_leaves((args, kwargs))
            return set(map(id, (*given, *self.model.parameters(), *self.model.buffers(), *by_user)))

        return widened_outputs(result, self.kind()[1], own)

    def watched(self, run: Callable[..., Any], by_user: Conversions) -> Callable[..., Any]:
        """Wrap ``run``, a partial graph, to record the low-precision values that the user's own casts return.

        The first call with them also records values that share memory without autocast, as later code may write them.
        """

        def call(*args: Any) -> Any:
            if not self.is_running():  # a recomputing backward runs it again
                return run(*args)
            first = _here.before is not None
            versions = {i: args[-1 - i]._version for i in inputs if not args[-1 - i].is_inference()} if first else {}
            results = run(*args)
            for position, sources in by_user.low.items():
                if all(_is_by_user(args[i]) for i in sources):
                    _note_low(results[position])
            for one, other in by_user.apart if first else ():
                source = args[-1 - one] if one < 0 else results[one]
                if one >= 0 or not _is_by_user(source):
                    _here.apart.append(((source, versions.get(one, 0)), (results[other], 0)))
            return results

        inputs = {one for one, _ in by_user.apart if one < 0}
        return call if by_user.low or by_user.apart else run

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without any capture."""
        if self.is_cast:
            with suppress(FailsUnderAutocast), self.region():
                return self.finished(self.attempt(forward, args, kwargs), args, kwargs)
        return forward(*args, **kwargs)

    def attempt(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in the region; the first one may find operations without low-precision kernels.

        Raises FailsUnderAutocast if the call can run again in fp32: the model's state, the inputs and the random state
        are then as before the call.
        """
        _here.before, _here.apart = None, []
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor) and t.dtype in METHODS.values():
                _note_low(t)
        try:
            if self._works or self._complain is None:
                return run(*args, **kwargs)
            return self._first_attempt(run, args, kwargs)
        finally:
            _here.before, _here.apart = None, []

    def _first_attempt(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, how, tell = ModelState(self.model, (args, kwargs)), self.how, self._complain
        _here.before = before
        try:
            result = run(*args, **kwargs)
            if any(_is_shown(one, other, result) for one, other in _here.apart):
                self.stop_for_fp32("writes or returns a value and its .float(), which share memory without autocast")
        except (NeedsFp32, RuntimeError, TypeError, ValueError) as error:
            cause = getattr(error, "inner_exception", error)
            if not (isinstance(cause, NeedsFp32) or is_of_precision(error)) or before.is_lost():
                raise
            before.restore()
            self._fails = True
            what = "gives other results" if isinstance(cause, NeedsFp32) else "fails"
            assert tell is not None, "asked by attempt"
            tell(
                f"code that escapes capture {what} {how}: it runs in fp32 from now on; what it did until then "
                "outside of the model and its inputs happened twice",
                f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}",
            )
            raise FailsUnderAutocast from error
        self._works = True
        return result

    @staticmethod
    def stop_for_fp32(why: str) -> None:
        """Raise NeedsFp32 with ``why`` if this thread's call can still be undone."""
        before = getattr(_here, "before", None)
        if before is not None and not before.is_lost():
            raise NeedsFp32(why)


def _in_region(node: Any, kind: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the backward of ``node`` under autocast: it may compute again what its forward computed there."""
    reference, backward = weakref.ref(node), type(node).apply

    def apply(*grads: Any) -> Any:
        with autocast_region(kind, dtype):
            return backward(reference(), *grads)

    return apply


def _note_low(t: torch.Tensor) -> None:
    """Record, until the call ends, that the storage of ``t`` is low without autocast as well."""
    key = storage_key(t)
    if key is not None:
        _here.low[key] = StorageWeakRef(storage_of(t))  # a live reference, so that no other storage gets the key


def _is_by_user(t: torch.Tensor) -> bool:
    """Return whether this call has recorded that ``t`` is low without autocast as well."""
    return isinstance(t, torch.nn.Parameter) or storage_key(t) in _here.low


def _is_shown(one: tuple[torch.Tensor, int], other: tuple[torch.Tensor, int], result: Any) -> bool:
    """Return whether the user can see that two tensors do not share memory: one was written, or both are returned.

    Each comes with its earlier version counter. Writes in inference mode are not counted.
    """
    if any(not t.is_inference() and t._version != version for t, version in (one, other)):
        return True
    returned = {storage_key(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    return {storage_key(one[0]), storage_key(other[0])} <= returned
