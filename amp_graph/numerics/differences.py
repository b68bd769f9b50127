"""The differences between runs of one graph, node by node: of values, of gradients, and which node made them.

Before: the values and gradients of a run in fp64. After: for each node of another run, its relative error, and the
error that it *introduced*: that of its result less what the errors of its inputs alone cause, found by the same
operation in fp64 on the same inputs. Weighted by the gradients of the loss, the errors of all nodes have one unit:
cancellation is so not blamed on the subtraction, but on the operation that rounded the large operands.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.devices import device_of_model
from amp_graph.model_state import unchanged
from amp_graph.numerics.batches import LossFn, gradients, output_and_loss, refuse_infinite
from amp_graph.numerics.exact_runs import Exact, first_of, origin, wide
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

    def weight(self, names: Iterable[str]) -> float:
        """Return the size of value times gradient of these nodes; of the outputs, it is the unit of errors."""
        pairs = ((self.values[n], self.gradients[n]) for n in names if n in self.gradients)
        return math.hypot(*(_norm((value * gradient).nan_to_num(0.0, 0.0, 0.0)) for value, gradient in pairs))


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
    forward: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


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
        name, got, (expected, _) = node.name, first_of(result), exact
        if got is None or got.shape != expected.shape or name not in self.ref.values:
            return
        wrong = difference(got.detach().double(), expected.detach())
        self.found.forward[name] += self._effect(wrong, name)
        if expected.requires_grad and isinstance(result, Tensor):
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
        result, inputs = exact[0], {name: t for name, t in exact[1].items() if t.requires_grad}
        seed = grad.to(result.dtype) / self.scale
        found = torch.autograd.grad(result, list(inputs.values()), seed, allow_unused=True)
        self.expected |= {(node.name, n): g.double() for n, g in zip(inputs, found, strict=True) if g is not None}

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
            self.found.backward[reader.name] += math.inf if math.isinf(wrong) else wrong / size * share

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


def difference(got: Tensor, ref: Tensor) -> Tensor:
    """Return ``got - ref``; 0 where the reference is masked, infinite where ``got`` alone is not finite."""
    return torch.where(_is_masked(ref), 0.0, torch.where(torch.isfinite(got), got - ref, math.inf))


def scale_for_fp16(gradients: Iterable[Tensor], room: float) -> float:
    """Return a loss scale with which all ``gradients`` stay below the end of fp16 by the factor ``room``."""
    largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    if not 0.0 < largest < math.inf:
        return 1.0
    return max(1.0, min(2.0**16, 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / room / largest))))


def _is_masked(ref: Tensor) -> Tensor:
    return ~torch.isfinite(ref) | (ref <= MASK)


def _norm(found: Tensor) -> float:
    return math.sqrt(_square(found))


def _square(found: Tensor) -> float:
    total = float(found.square().sum())
    return math.inf if math.isnan(total) else total


# -- whole runs: outputs and gradients, and the error of another run -------------------------------------------

ROOM = 64.0  # by which the scaled gradients of parameters stay below the largest number of fp16: others are larger
Values = dict[str, Tensor]  # "output 0", "gradient of head.weight", in float64


def values_of(model: torch.nn.Module, out: Any, loss: Tensor | None, scale: float = 1.0) -> Values:
    """Return what a run returned, and the gradients of its loss, which are computed with a loss ``scale``."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads: Sequence[Tensor | None] = [None] * len(named)
    if loss is not None and loss.requires_grad and named:
        grads = gradients(model, loss * scale, list(named.values()))
    leaves = [t for t in tree_leaves(as_containers(out)) if isinstance(t, Tensor) and t.is_floating_point()]
    # A result may be a buffer or an input, which is restored.
    found = {f"output {i}": t.detach().to(torch.float64, copy=True) for i, t in enumerate(leaves)}
    pairs = zip(named, grads, strict=True)
    return found | {f"gradient of {n}": g.double() / scale for n, g in pairs if g is not None and not g.is_sparse}


def error_of(found: Values, reference: Values) -> float:
    """Return the relative L2 error of all outputs or, if larger, of all gradients; infinite if any is not finite."""
    sums = {"output": Sums(), "gradient": Sums()}
    for name, ref in reference.items():
        got, of_kind = found.get(name, torch.zeros_like(ref)), sums[name.partition(" ")[0]]
        if got.shape == ref.shape:
            of_kind.add(got, ref)
        else:
            of_kind.wrong = math.inf
    return max(one.error for one in sums.values())


def scale_of(reference: Values) -> float:
    """Return a loss scale for runs in fp16, by the gradients of a reference."""
    return scale_for_fp16((t for name, t in reference.items() if name.startswith("gradient")), ROOM)


def error_metric(
    model: torch.nn.Module, batches: Sequence[Any], loss_fn: LossFn | None, policy: Policy
) -> Callable[[torch.nn.Module, Sequence[Any]], float]:
    """Return the metric of ``bisect`` by default: the error over all batches against fp64, which runs once.

    Where an operation has no kernel for float64, or asks for float32, it is against fp32.
    """

    def values(model: torch.nn.Module, batches: Sequence[Any], scale: float | None = None) -> Values:
        found: Values = {}
        for number, batch in enumerate(batches):
            with unchanged(model, batch), torch.enable_grad():
                out, loss = output_and_loss(model, loss_fn, batch)
                if scale is None:
                    refuse_infinite("bisect", loss, number)
                of_batch = values_of(model, out, loss, scale or 1.0)
            found |= {f"{name} in batch {number}": value for name, value in of_batch.items()}
        return found

    try:
        reference = values(copy.deepcopy(model).double(), tree_map(wide, batches))
    except (RuntimeError, TypeError):
        reference = values(copy.deepcopy(model), batches)
    is_fp16 = policy.torch_dtype(device_of_model(model) or "cpu") == torch.float16
    scale = scale_of(reference) if is_fp16 else 1.0
    return lambda model, batches: error_of(values(model, batches, scale), reference)


def as_containers(out: Any) -> Any:
    """Return what a model returned as containers that are known: Hugging Face's outputs are dicts."""
    if isinstance(out, dict):
        return dict(out)
    return vars(out) if hasattr(out, "__dict__") and not isinstance(out, Tensor) else out
