"""The differences between runs of one graph, node by node: of values, of gradients, and which node made them.

Before: the values and gradients of a run in fp64. After: for each node of another run, its relative error, and the
error that it *introduced*: that of its result less what the errors of its inputs alone cause, found by the same
operation in fp64 on the same inputs. Weighted by the gradients of the loss, the errors of all nodes have one unit:
cancellation is so not blamed on the subtraction, but on the operation that rounded the large operands.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.devices import device_of_model
from amp_graph.model_state import unchanged
from amp_graph.numerics.batches import LossFn, gradients, output_and_loss, refuse_infinite
from amp_graph.numerics.exact_runs import Exact, origin, wide
from amp_graph.passes.calibration.ranges import MASK
from amp_graph.passes.graph.observe import GradientSink
from amp_graph.policy import Policy

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
        """The relative error, absolute where all is 0; infinite if anything is not finite."""
        return math.sqrt(self.wrong / (self.size or 1.0))


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


# -- the error of a whole run: the metric of ``bisect`` by default ---------------------------------------------

ROOM = 64.0  # by which the scaled gradients of parameters stay below the largest number of fp16: others are larger
Ran = dict[int | str, Tensor]  # the outputs of a batch, by number, and the gradients of parameters, in float64


class ErrorMetric:
    """The relative L2 error of all outputs or, if larger, of all gradients of parameters, against fp64.

    The reference runs once; gradients have a loss scale in fp16.
    """

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any], loss_fn: LossFn | None, policy: Policy) -> None:
        self.loss_fn, self.scale = loss_fn, 1.0
        self.reference = self._reference(model, batches)
        if policy.torch_dtype(device_of_model(model) or "cpu") == torch.float16:
            grads = [g for ran in self.reference for name, g in ran.items() if isinstance(name, str) and g.numel()]
            self.scale = scale_for_fp16(max((float(g.abs().max()) for g in grads), default=0.0), ROOM)

    def __call__(self, model: torch.nn.Module, batches: Sequence[Any]) -> float:
        """Return the error over all batches; infinite if anything is not finite that is in the reference."""
        outputs, grads = Sums(), Sums()
        for batch, expected in zip(batches, self.reference, strict=True):
            got = self._run(model, batch, self.scale)
            for name, ref in expected.items():
                sums = outputs if isinstance(name, int) else grads
                found = got.get(name, torch.zeros_like(ref))
                if found.shape == ref.shape:
                    sums.add(found, ref)
                else:
                    sums.wrong = math.inf
        return max(outputs.error, grads.error)

    def _reference(self, model: torch.nn.Module, batches: Sequence[Any]) -> list[Ran]:
        try:
            in_fp64 = copy.deepcopy(model).double()
            return [self._run(in_fp64, tree_map(wide, batch), 1.0, n) for n, batch in enumerate(batches)]
        except (RuntimeError, TypeError):  # an operation without a kernel for float64, or that asks for float32
            return [self._run(copy.deepcopy(model), batch, 1.0, n) for n, batch in enumerate(batches)]

    def _run(self, model: torch.nn.Module, batch: tuple[Any, ...], scale: float, number: int | None = None) -> Ran:
        """Run a batch; ``number``: its number, for one whose loss must be finite."""
        with unchanged(model, batch), torch.enable_grad():
            out, loss = output_and_loss(model, self.loss_fn, batch)
            if number is not None:
                refuse_infinite("bisect", loss, number)
            names = {name: p for name, p in model.named_parameters() if p.requires_grad}
            grads: Sequence[Tensor | None] = [None] * len(names)
            if loss is not None and loss.requires_grad and names:
                grads = gradients(model, loss * scale, list(names.values()))
            leaves = [t for t in tree_leaves(as_containers(out)) if isinstance(t, Tensor) and t.is_floating_point()]
            # A result may be a buffer or an input, which is restored.
            found: Ran = {i: t.detach().to(torch.float64, copy=True) for i, t in enumerate(leaves)}
        pairs = zip(names, grads, strict=True)
        return found | {n: g.detach().double() / scale for n, g in pairs if g is not None and not g.is_sparse}


def as_containers(out: Any) -> Any:
    """Return what a model returned as containers that are known: Hugging Face's outputs are dicts."""
    if isinstance(out, dict):
        return dict(out)
    return vars(out) if hasattr(out, "__dict__") and not isinstance(out, Tensor) else out
