"""Traces a captured graph with its backward, on fake tensors, and divides the trace into a ``Flat``.

Before: the rewritten GraphModule, and the arguments of a call. After: ``trace_flat(gm, args)``; and ``FlatGraphs(gm,
args)``, for calls whose arguments are of one kind, with a flat backward for each layout of the gradients that arrive.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.activation_checkpoints import run_checkpoint
from amp_graph.passes.graph.observe import Observer, Sink
from amp_graph.passes.torch_compat.dynamo_capture import one_capture_at_a_time
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits
from amp_graph.passes.torch_compat.fake import FakeTensorMode, make_fx, names_traced_so_far, outside_modes
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.replay.flat_graph import Flat, Output, Pattern
from amp_graph.replay.recorder import CannotRecord

Backward = Callable[..., Sequence[Tensor | None]]  # of kept arguments, saved values, gradients of outputs
Key = tuple[Any, ...]


def trace_flat(
    gm: GraphModule, args: Sequence[Any], pattern: Pattern | None = None, routes: Sequence[int] | None = None
) -> Flat:
    """Trace ``gm`` and its backward for these arguments; ``pattern`` None: each output's gradient is laid out as it.

    routes: the arguments whose gradients backward returns; None: all to which the outputs lead.

    Nothing runs on real data. Raises CannotRecord with the reason.
    """
    grad = torch.is_grad_enabled()
    seen = Traced(gm, args, grad, pattern, routes)
    given = [args[i].detach().requires_grad_(grad and args[i].requires_grad) for i in seen.tensors]
    with (
        Attempt(CannotRecord) as tried,
        one_capture_at_a_time(),
        torch.no_grad(),
        # As in calls of captured graphs; a backward may run inside of a region.
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        collector_waits(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # kernels warn about fake operands
        joint = make_fx(seen, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    if tried.error is not None:
        raise CannotRecord(f"it cannot be traced: {tried.reason}") from tried.error
    return Flat(joint, seen)


class _Inline(Sink):
    """Makes a checkpoint's recomputation a part of the trace."""

    def called(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Run the graph of a checkpoint node by node as well."""
        if target is run_checkpoint:
            return target, (Observer(args[0], self).run, *args[1:]), {**kwargs, "keeps_random_state": False}
        return target, args, kwargs


class Traced:
    """The function that is traced; it notes what the outputs are, where forward ends, and what gradients belong to."""

    def __init__(
        self, gm: GraphModule, args: Sequence[Any], grad: bool, pattern: Pattern | None, given: Sequence[int] | None
    ) -> None:
        self.given = given
        self.run, self.args, self.grad, self.pattern = Observer(gm, _Inline()), list(args), grad, pattern
        self.tensors = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
        self.outputs: tuple[Output, ...] = ()
        self.forward_nodes: dict[str, None] = {}  # names, in order
        self.seed_nodes: list[str] = []
        self.made = 0
        self.routes: list[int] = []

    def __call__(self, *leaves: Tensor) -> list[Any]:
        """Run forward, and backward if gradients are recorded; return new outputs and gradients."""
        for i, leaf in zip(self.tensors, leaves, strict=True):
            self.args[i] = leaf
        with torch.set_grad_enabled(self.grad):
            new = self._read(self.run.run(*self.args), leaves)
        self.made = len(new)
        self.forward_nodes = names_traced_so_far()
        return [*new, *self._gradients([t for t in new if t.requires_grad], leaves)]

    def _read(self, results: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Note what the outputs are, and return those that are new tensors."""
        own = {id(leaf): i for i, leaf in zip(self.tensors, leaves, strict=True)}
        memory = {storage_key(leaf) for leaf in leaves}
        new: dict[int, int] = {}
        found, tensors = [], []
        for result in results:
            if not isinstance(result, Tensor):
                found.append(Output(constant=result))
            elif id(result) in own:
                found.append(Output(passed=own[id(result)]))
            else:
                if id(result) not in new:
                    key = storage_key(result)
                    if key is None:
                        raise CannotRecord("an output is not an ordinary tensor")
                    if key in memory:
                        raise CannotRecord("an output shares memory with an input or with another output")
                    memory.add(key)
                    new[id(result)] = len(new)
                    tensors.append(result)
                found.append(Output(place=new[id(result)], has_gradient=result.requires_grad))
        self.outputs = tuple(found)
        return tensors

    def _gradients(self, outs: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients in the order of ``routes``: those of all arguments that the outputs lead to."""
        if self.pattern is None:
            self.pattern = tuple(tuple(out.stride()) for out in outs)
        number = dict(zip(self.tensors, leaves, strict=True))
        wanted = [i for i, leaf in number.items() if leaf.requires_grad] if self.given is None else self.given
        pairs = [(out, steps) for out, steps in zip(outs, self.pattern, strict=True) if steps is not None]
        if not wanted or not pairs:
            self.routes = [*(self.given or ())]
            return [None for _ in self.routes]
        seeds = [torch.empty_strided(o.shape, s, dtype=o.dtype, device=o.device) for o, s in pairs]
        self.seed_nodes = [name for name in names_traced_so_far() if name not in self.forward_nodes]
        found = torch.autograd.grad([o for o, _ in pairs], [number[i] for i in wanted], seeds, allow_unused=True)
        kept = [(i, g) for i, g in zip(wanted, found, strict=True) if g is not None or self.given is not None]
        self.routes = [i for i, _ in kept]
        return [g for _, g in kept]


# -- for calls of one kind -----------------------------------------------------------------------------


def key_of(args: Sequence[Any]) -> Key:
    """Return what a trace depends on: sizes, strides, dtypes, devices, who has a gradient, and all numbers."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *[
        (a.shape, a.stride(), a.dtype, a.device, a.requires_grad) if isinstance(a, Tensor) else a for a in args
    ]  # fmt: skip


def pattern_of(given: Sequence[Tensor | None]) -> Pattern:
    """Return how the gradients of outputs are laid out."""
    return tuple(None if g is None else tuple(g.stride()) for g in given)


class FlatGraphs:
    """The flat graphs of one captured graph for arguments of one ``key_of``."""

    def __init__(self, gm: GraphModule, args: Sequence[Any]) -> None:
        """Trace forward, and backward for gradients laid out as the outputs; raises CannotRecord."""
        self._gm = gm
        mode = FakeTensorMode()
        with outside_modes():
            self._like = [
                mode.from_tensor(a.detach().requires_grad_(a.requires_grad)) if isinstance(a, Tensor) else a
                for a in args
            ]
        self._grad = torch.is_grad_enabled()
        self.flat = trace_flat(gm, self._like)
        self._backwards: dict[Pattern, tuple[Flat, Backward]] = {}
        if self.flat.run_backward is not None:
            self._backwards[self.flat.pattern] = (self.flat, self.flat.run_backward)

    def backward(self, given: Sequence[Tensor | None]) -> tuple[Flat, Backward] | None:
        """Return a backward for gradients laid out as ``given``, on all kept arguments and saved values; None: zero."""
        pattern = pattern_of(given)
        if pattern not in self._backwards:
            with torch.set_grad_enabled(self._grad):
                found = trace_flat(self._gm, self._like, pattern, self.flat.routes)
            if found.backward is None:
                return None
            self._backwards[pattern] = (found, self._as_first(found))
        return self._backwards[pattern]

    def _as_first(self, other: Flat) -> Backward:
        """Return the backward of ``other`` with the inputs of the first one."""
        first, run = self.flat, other.run_backward
        assert run is not None, "asked before"
        known = [*(("kept", i) for i in first.kept), *(("saved", name) for name in first.saved)]
        wanted = [*(("kept", i) for i in other.kept), *(("saved", name) for name in other.saved)]
        if not set(wanted) <= set(known):
            raise CannotRecord("backward for these gradients reads other values than backward for all of them")
        places, count = [known.index(one) for one in wanted], len(known)

        def backward(*given: Any) -> Sequence[Tensor | None]:
            found: Sequence[Tensor | None] = run(*(given[i] for i in places), *given[count:])
            return found

        return backward
