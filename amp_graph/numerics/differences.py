"""The differences between runs of one graph, node by node: of values, of gradients, and which node made them.

Before: the values and gradients of a run in fp64. After: for each node of another run, its relative error, and the
error that it *introduced*: that of its result less what the errors of its inputs alone cause, found by the same
operation in fp64 on the same inputs. Weighted by the gradients of the loss, the errors of all nodes have one unit:
cancellation is so not blamed on the subtraction, but on the operation that rounded the large operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from amp_graph.numerics.exact_operations import Exact, origin
from amp_graph.numerics.variants import FP64, MODES, Variants
from amp_graph.passes.calibration.node_keys import node_keys
from amp_graph.passes.calibration.ranges import MASK
from amp_graph.passes.graph.observe import GradientSink

Read = tuple[str, str]  # the names of reader and source


@dataclass(eq=False)
class Reference(GradientSink):
    """The values and gradients of one run of one graph, which others are compared with, by names of nodes."""

    written: frozenset[str] = frozenset()
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    reads: dict[Read, Tensor] = field(default_factory=dict)

    def value(self, node: Node, result: Any) -> None:
        """Keep a value."""
        first = first_of(result)
        if first is not None:
            kept = first.detach().double()
            self.values[node.name] = kept.clone() if node.name in self.written else kept

    def gradient(self, node: Node, grad: Tensor, part: int) -> None:
        """Keep the gradient of a value; of several, that of the first."""
        if part == 0 and node.name in self.values and grad.shape == self.values[node.name].shape:
            self.gradients[node.name] = grad.double()

    def returned(self, reader: Node, source: Node, grad: Tensor) -> None:
        """Keep the gradient of one read."""
        self.reads[reader.name, source.name] = grad.double()

    def largest_gradient(self) -> float:
        """Return the largest magnitude of any gradient; 0 without one."""
        return max((float(g.abs().max()) for g in self.gradients.values() if g.numel()), default=0.0)

    def weight(self, names: Iterable[str]) -> float:
        """Return the size of value times gradient of these nodes; of the outputs, it is the unit of errors."""
        known = (n for n in names if n in self.gradients)
        return math.hypot(*(_norm((self.values[n] * self.gradients[n]).nan_to_num(0.0, 0.0, 0.0)) for n in known))


@dataclass(eq=False)
class Sums:
    """Squared errors and squared sizes of one node, added up over batches."""

    wrong: float = 0.0
    size: float = 0.0

    def add(self, got: Tensor, ref: Tensor) -> None:
        """Add the errors of one batch."""
        self.wrong += _square(difference(got, ref))
        self.size += _square(torch.where(_is_masked(ref), 0.0, ref))

    @property
    def error(self) -> float:
        """The relative error; infinite if anything is not finite."""
        if not self.wrong:
            return 0.0
        return math.sqrt(self.wrong / self.size) if self.size and math.isfinite(self.wrong) else math.inf


@dataclass(eq=False)
class Differences:
    """The errors of one mode over all batches, by node name.

    ``introduced``: the sums of what each node introduced in forward and in backward, over the batches.
    """

    values: dict[str, Sums] = field(default_factory=dict)
    gradients: dict[str, Sums] = field(default_factory=dict)
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Against(GradientSink):
    """A sink that compares one run with a ``Reference``, and adds to ``found``.

    ``scale``: of the loss of this run. ``unit``: the weight of the outputs.
    """

    ref: Reference
    found: Differences
    scale: float = 1.0
    unit: float = 1.0
    exact: dict[str, Exact] = field(default_factory=dict)
    expected: dict[Read, Tensor] = field(default_factory=dict)

    def value(self, node: Node, result: Any) -> None:
        """Compare a value."""
        ref, first = self.ref.values.get(node.name), first_of(result)
        if ref is not None and first is not None and first.shape == ref.shape:
            self.found.values.setdefault(node.name, Sums()).add(first.detach().double(), ref)

    def local(self, node: Node, result: Any, exact: Exact) -> None:
        """Take what ``node`` returns in fp64 on the same inputs."""
        name, got = node.name, first_of(result)
        if got is None or got.shape != exact.result.shape or name not in self.ref.values:
            return
        wrong = difference(got.detach().double(), exact.result.detach())
        _add(self.found.forward, name, self._effect(wrong, name))
        if exact.result.requires_grad and isinstance(result, Tensor):
            self.exact[name] = exact

    def gradient(self, node: Node, grad: Tensor, part: int) -> None:
        """Compare a gradient, and find what the exact backward makes of it; of several values, that of the first."""
        if part:
            return
        ref = self.ref.gradients.get(node.name)
        if ref is not None and grad.shape == ref.shape:
            self.found.gradients.setdefault(node.name, Sums()).add(grad.double() / self.scale, ref)
        exact = self.exact.pop(node.name, None)
        if exact is None:
            return
        names = [name for name, t in exact.inputs.items() if t.requires_grad]
        given = grad.to(exact.result.dtype) / self.scale
        found = torch.autograd.grad(exact.result, [exact.inputs[n] for n in names], given, allow_unused=True)
        self.expected |= {(node.name, n): g.double() for n, g in zip(names, found, strict=True) if g is not None}

    def returned(self, reader: Node, source: Node, grad: Tensor) -> None:
        """Compare a gradient with what the same backward returns in fp64 for the same gradient and inputs."""
        read = reader.name, origin(source).name
        ref, expected = self.ref.reads.get(read), self.expected.pop(read, None)
        value = self.ref.values.get(read[1])
        if ref is None or expected is None or value is None or not grad.shape == ref.shape == value.shape:
            return
        wrong, size = _norm(difference(grad.double() / self.scale, expected)), _norm(ref)
        share = min(1.0, _norm(torch.where(_is_masked(value), 0.0, value) * ref) / self.unit)
        if wrong and size:
            _add(self.found.backward, reader.name, math.inf if math.isinf(wrong) else wrong / size * share)

    def _effect(self, wrong: Tensor, name: str) -> float:
        """Return the size of an error of a value in the loss, relative to that of the outputs.

        Without any gradients, it is relative to the value.
        """
        weight = self.ref.gradients.get(name)
        if not bool(torch.isfinite(wrong).all()):
            return math.inf
        if weight is not None and weight.shape == wrong.shape:
            return _norm(wrong * weight) / self.unit
        return 0.0 if self.ref.gradients else _norm(wrong) / (_norm(self.ref.values[name]) or 1.0)


def _add(into: dict[str, float], name: str, more: float) -> None:
    into[name] = into.get(name, 0.0) + more


def difference(got: Tensor, ref: Tensor) -> Tensor:
    """Return ``got - ref``; 0 where the reference is masked, infinite where ``got`` alone is not finite."""
    wrong = torch.where(torch.isfinite(got), got - ref, math.inf)
    return torch.where(_is_masked(ref), 0.0, wrong)


def scale_for_fp16(largest: float, room: float) -> float:
    """Return a loss scale with which a gradient of ``largest`` stays below the end of fp16 by the factor ``room``."""
    if not 0.0 < largest < math.inf:
        return 1.0
    return max(1.0, min(2.0**16, 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / room / largest))))


def _is_masked(ref: Tensor) -> Tensor:
    return ~torch.isfinite(ref) | (ref <= MASK)


def _norm(found: Tensor) -> float:
    return math.sqrt(_square(found))


def _square(found: Tensor) -> float:
    if not found.numel():
        return 0.0
    total = float(found.square().sum())
    return math.inf if math.isnan(total) else total


def first_of(result: Any) -> Tensor | None:
    """Return the tensor of a result that is compared: itself, or the first of several; None if it is not dense."""
    found = result[0] if isinstance(result, (tuple, list)) and result else result
    plain = isinstance(found, Tensor) and found.layout == torch.strided and not found.is_nested
    return found if plain and found.is_floating_point() else None


@dataclass(eq=False)
class ComparedGraph:
    """One captured graph, or one inside of another: its forms, and what was found of it.

    ``outputs``: those that leave the captured graph. ``refs``: a reference for each run of a batch; ``runs``: how many
    there were in the mode of the moment. ``bodies``: what runs the graphs inside it.
    """

    forms: Variants
    keys: dict[Node, str]
    written: frozenset[str]
    outputs: tuple[str, ...]
    refs: list[Reference] = field(default_factory=list)
    runs: int = 0
    bodies: dict[str, Callable[..., Any]] = field(default_factory=dict)
    found: dict[str, Differences] = field(default_factory=lambda: {mode: Differences() for mode in MODES[1:]})

    @classmethod
    def of(cls, forms: Variants) -> ComparedGraph:
        """Return the graph of ``forms``, without what runs the graphs inside it."""
        graph = forms.prepared.graph
        written = frozenset(n.name for n in graph.nodes if forms.memory.is_written(n))
        outputs = tuple(n.name for n in graph.output_node().all_input_nodes) if forms.is_whole else ()
        return cls(forms, node_keys(forms.prepared), written, outputs)

    def sink(self, mode: str, scale: float, unit: float) -> Reference | Against:
        """Return what takes the next run: its reference, or what compares it; a run that fp64 has not made is alone."""
        if mode == FP64:
            self.refs.append(Reference(self.written))
            return self.refs[-1]
        ref = self.refs[self.runs] if self.runs < len(self.refs) else Reference()
        self.runs += 1
        return Against(ref, self.found[mode], scale, unit)
