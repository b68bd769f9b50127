"""The differences between two runs of one graph, node by node: of values, of gradients, and which node made them.

Before: the values and gradients of a run in fp64. After: for each node of another run, its relative error, and the
error that it *introduced*: that of its result less that of what it read, each weighted by the gradients of the loss.
Cancellation is so not blamed on the subtraction, but on the operation that rounded the large operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from amp_graph.numerics.variants import origin
from amp_graph.passes.calibration.ranges import MASK

Read = tuple[str, str]  # the names of reader and source


@dataclass(eq=False)
class Reference:
    """The values and gradients of one run of one graph, which others are compared with, by names of nodes."""

    written: frozenset[str] = frozenset()
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    reads: dict[Read, Tensor] = field(default_factory=dict)

    def value(self, node: Node, result: Any) -> None:
        if _is_comparable(result):
            kept = result.detach().double()
            self.values[node.name] = kept.clone() if node.name in self.written else kept

    def gradient(self, node: Node, grad: Tensor) -> None:
        if node.name in self.values and grad.shape == self.values[node.name].shape:
            self.gradients[node.name] = grad.double()

    def returned(self, reader: Node, source: Node, grad: Tensor) -> None:
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
class Against:
    """A sink that compares one run with a ``Reference``, and adds to ``found``; ``reads``: the sources of each node."""

    ref: Reference
    found: Differences
    reads: Mapping[str, tuple[str, ...]]
    scale: float = 1.0  # of the loss of this run
    unit: float = 1.0
    wrong: dict[str, Tensor] = field(default_factory=dict)
    gradient_errors: dict[str, float] = field(default_factory=dict)

    def value(self, node: Node, result: Any) -> None:
        ref = self.ref.values.get(node.name)
        if ref is None or not _is_comparable(result) or result.shape != ref.shape:
            return
        got = result.detach().double()
        self.found.values.setdefault(node.name, Sums()).add(got, ref)
        self.wrong[node.name] = difference(got, ref)
        if node.name in self.reads:
            own = self._effect(node.name, self.ref.gradients.get(node.name))
            read = [self._effect(s, self.ref.reads.get((node.name, s))) for s in self.reads[node.name]]
            self._note(self.found.forward, node.name, own, math.hypot(*read))

    def gradient(self, node: Node, grad: Tensor) -> None:
        ref = self.ref.gradients.get(node.name)
        if ref is not None and grad.shape == ref.shape:
            got = grad.double() / self.scale
            self.found.gradients.setdefault(node.name, Sums()).add(got, ref)
            self.gradient_errors[node.name] = _relative(got, ref)

    def returned(self, reader: Node, source: Node, grad: Tensor) -> None:
        name = origin(source).name
        ref = self.ref.reads.get((reader.name, name))
        if ref is None or grad.shape != ref.shape or reader.name not in self.reads:
            return
        share = _norm(self.ref.values[name] * ref) / self.unit if name in self.ref.values and self.unit else 0.0
        own = _relative(grad.double() / self.scale, ref) * min(1.0, share)
        before = self.gradient_errors.get(reader.name, 0.0) * min(1.0, share)
        self._note(self.found.backward, reader.name, own, before)

    def _effect(self, name: str, weight: Tensor | None) -> float:
        """Return the size of the error of a value in the loss; without gradients, relative to the value."""
        wrong = self.wrong.get(name)
        if wrong is None:
            return 0.0
        if weight is None or weight.shape != wrong.shape:
            return 0.0 if self.ref.gradients else _norm(wrong) / (_norm(self.ref.values[name]) or 1.0)
        if not bool(torch.isfinite(wrong).all()):
            return math.inf
        return _norm(wrong * weight) / self.unit if self.unit else 0.0

    def _note(self, into: dict[str, float], name: str, own: float, before: float) -> None:
        if math.isinf(own):
            more = 0.0 if math.isinf(before) else math.inf
        else:
            more = max(0.0, own - before)
        into[name] = into.get(name, 0.0) + more


def difference(got: Tensor, ref: Tensor) -> Tensor:
    """Return ``got - ref``; 0 where the reference is masked, infinite where ``got`` alone is not finite."""
    wrong = torch.where(torch.isfinite(got), got - ref, math.inf)
    return torch.where(_is_masked(ref), 0.0, wrong)


def _is_masked(ref: Tensor) -> Tensor:
    return ~torch.isfinite(ref) | (ref <= MASK)


def _relative(got: Tensor, ref: Tensor) -> float:
    wrong, size = _norm(difference(got, ref)), _norm(ref)
    if not wrong:
        return 0.0
    return wrong / size if size and math.isfinite(wrong) else math.inf


def _norm(found: Tensor) -> float:
    return math.sqrt(_square(found))


def _square(found: Tensor) -> float:
    if not found.numel():
        return 0.0
    total = float(found.square().sum())
    return math.inf if math.isnan(total) else total


def _is_comparable(result: Any) -> bool:
    plain = isinstance(result, Tensor) and result.layout == torch.strided and not result.is_nested
    return plain and result.is_floating_point()
