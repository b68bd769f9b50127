"""Every operator of PyTorch's own database, in a program of its own, converted and compared with eager and autocast.

``make conformance`` runs all of them. ``findings(name, operators()[name], "bf16")`` yields what differs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import amp_graph

SAMPLES = 4
# What rounding differently once costs, relative to the whole result: a result may be rounded to `dtype` where autocast
# returns fp32 whose last operation was the same kernel. Applies where autocast itself computes in low precision.
ROUNDINGS = 2.0
FAST = 2.2  # how much less exact accuracy "fast" may be, as in test_accuracy.py
# Where autocast is as exact as fp32, so are we.
FP32_ERROR = 1e-5
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Finding:
    """One difference of one sample: what kind, and what was seen."""

    operator: str
    sample: int
    policy: str
    kind: str
    seen: str

    def __str__(self) -> str:
        return f"{self.operator}[{self.sample}] {self.policy}: {self.kind}: {self.seen}"


@dataclass(frozen=True)
class Outcome:
    """What a call returned: its tensors and its gradients, or the exception."""

    results: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor | None, ...] = ()
    error: Exception | None = None


def operators() -> dict[str, OpInfo]:
    """Return every operator with a float32 kernel on the CPU, by its full name."""
    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
        for op in op_db
        if torch.float32 in op.supported_dtypes("cpu")
    }


class Program(nn.Module):
    """An operator between two products by one: its operands and its results may be low, and what is rounded is exact.

    The operands hold values that bf16 and fp16 hold, so a lowered operand is the operand.
    """

    def __init__(self, function: Callable[..., Any], spec: Any, places: tuple[int, ...], others: list[Any]) -> None:
        super().__init__()
        self.function, self.spec, self.places, self.others = function, spec, places, others
        self.one = nn.Parameter(torch.ones(1, 1), requires_grad=False)

    def forward(self, *given: Tensor) -> Any:
        return pytree.tree_map(self._lowered, self._called(*given))

    def _called(self, *given: Tensor) -> Any:
        leaves = list(self.others)
        for place, tensor in zip(self.places, given, strict=True):
            leaves[place] = self._lowered(tensor)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def _lowered(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        # What a call without graphs, or autocast, holds in low precision is multiplied as well, as in fp32.
        if tensor.dtype not in (torch.float32, *LOW.values()):
            return tensor
        return (tensor.reshape(-1, 1) @ self.one.to(tensor.dtype)).reshape(tensor.shape)


class Direct(Program):
    """The operator as the whole of a program: on fp32 operands, as captured."""

    def _lowered(self, tensor: Any) -> Any:
        return tensor


def _rounded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with values that both low precisions hold."""
    return tensor.detach().to(torch.bfloat16).to(torch.float16).to(torch.float32).requires_grad_(tensor.requires_grad)


def program_of(op: OpInfo, sample: SampleInput, kind: type[Program]) -> tuple[Program, tuple[Tensor, ...]]:
    """Return a program that calls ``op`` as ``sample`` does, and the tensors to call it with."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    given = tuple(
        _rounded(t) if t.dtype == torch.float32 and t.layout == torch.strided else t
        for t in (leaves[i] for i in places)
    )
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return kind(op.op, spec, places, others), given


def _fresh(given: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the operands anew, as leaves, of ``dtype`` where they are fp32, with the strides they had."""
    made = []
    for tensor in given:
        changed = tensor.dtype == torch.float32
        new = tensor.detach().to(dtype if changed else tensor.dtype, copy=True)
        made.append(new.requires_grad_(tensor.requires_grad))
    return tuple(made)


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor))


def outcome(
    program: Callable[..., Any],
    given: tuple[Tensor, ...],
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """Call ``program``, forward in ``context``, and differentiate all float results with fixed cotangents."""
    given = _fresh(given, dtype)
    torch.manual_seed(7)
    try:
        with context():
            results = tensors_of(program(*given))
        gradients = _gradients(results, given)
        return Outcome(tuple(r.detach() for r in results), gradients)
    except Exception as error:
        return Outcome(error=error)


def _gradients(results: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    wanted = [t for t in given if t.requires_grad]
    ends = [r for r in results if r.requires_grad and r.layout == torch.strided]
    if not wanted or not ends:
        return ()
    random = torch.Generator().manual_seed(11)
    seeds = []
    for end in ends:
        shape = torch.view_as_real(torch.empty_like(end)).shape if end.is_complex() else end.shape
        drawn = torch.randn(shape, generator=random).to(torch.bfloat16).double()
        seeds.append((torch.view_as_complex(drawn) if end.is_complex() else drawn).to(end.dtype))
    return torch.autograd.grad(ends, wanted, seeds, allow_unused=True)


def findings(name: str, op: OpInfo, policy: str, samples: int = SAMPLES) -> Iterator[Finding]:
    """Yield what differs where the first ``samples`` samples of ``op`` run under ``policy``."""
    torch.manual_seed(3)
    grads = op.supports_autograd
    for number, sample in zip(
        range(samples), op.sample_inputs("cpu", torch.float32, requires_grad=grads), strict=False
    ):
        for kind in (Program, Direct):
            program, given = program_of(op, sample, kind)
            for what, seen in compared(program, given, policy):
                yield Finding(name, number, f"{policy}{',direct' if kind is Direct else ''}", what, seen)


def in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a rule of autocast for fp32 would run it: some kernels are for fp32 alone.

    The products around it run under autocast still: fp16 holds not all that the kernel returns.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        wide = pytree.tree_map(
            lambda t: t.float() if isinstance(t, Tensor) and t.dtype in LOW.values() else t, (args, kwargs)
        )
        with torch.autocast("cpu", enabled=False):
            return function(*wide[0], **wide[1])

    return call


def compared(program: Program, given: tuple[Tensor, ...], policy: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, what was seen) of each difference between the converted program and PyTorch's own runs."""
    low = LOW[policy.partition(",")[0]]
    eager = outcome(program, given)
    if eager.error is not None:
        return
    theirs = outcome(program, given, lambda: torch.autocast("cpu", low))
    if theirs.error is not None:
        function, program.function = program.function, in_fp32(program.function)
        theirs = outcome(program, given, lambda: torch.autocast("cpu", low))
        program.function = function
    exact = outcome(program.double(), given, dtype=torch.float64)
    program.float()
    again = outcome(program, given)
    torch._dynamo.reset()
    ours = outcome(amp_graph.convert(program, policy), given)
    if ours.error is not None:
        yield "raises", f"{type(ours.error).__name__}: {str(ours.error)[:300]}"
        return
    yield from _shapes("result", ours.results, eager.results)
    yield from _shapes("gradient", ours.gradients, eager.gradients)
    if not _same(eager, again):  # uninitialised memory, or other random numbers
        return
    exact = eager if exact.error is not None or _differs_in_shape(exact, eager) else exact
    usable = theirs.error is None and not _differs_in_shape(theirs, eager)
    for part in ("results", "gradients"):
        columns = zip(getattr(ours, part), getattr(exact, part), getattr(eager, part), strict=False)
        for i, (mine, true, fp32) in enumerate(columns):
            if not isinstance(mine, Tensor) or not isinstance(true, Tensor) or mine.shape != true.shape:
                continue
            other = getattr(theirs, part)[i] if usable else None
            bound = _bound(other, true, fp32, low) * (FAST if "fast" in policy else 1.0)
            if not (wrong := error(mine, true, fp32, other)) <= bound:
                yield f"{part[:-1]} value", f"#{i} error {wrong:.2e}, allowed {bound:.2e}"


def _bound(other: Tensor | None, true: Tensor, fp32: Tensor, low: torch.dtype) -> float:
    """Return the error that is allowed: autocast's, and a few roundings where that computes in low precision."""
    own = error(fp32, true, fp32, None)
    if other is None:
        return max(4 * torch.finfo(low).eps, 2 * own)
    theirs = error(other, true, fp32, None)
    roundings = ROUNDINGS * torch.finfo(low).eps if theirs > FP32_ERROR + 2 * own else 0.0
    return 1.5 * theirs + 2 * own + FP32_ERROR + roundings


def error(got: Tensor, true: Tensor, fp32: Tensor, other: Tensor | None) -> float:
    """Return the relative L2 error of ``got``; infinite where it is not finite and the others are."""
    if got.layout != torch.strided:
        got, true, fp32 = (t.to_dense() for t in (got, true, fp32))
        other = None if other is None else other.to_dense()
    if not (got.is_floating_point() or got.is_complex()):
        return 0.0 if torch.equal(got, true.to(got.dtype)) else math.inf
    wide = torch.complex128 if got.is_complex() else torch.float64
    got, true = got.to(wide), true.to(wide)
    finite = true.isfinite() & fp32.isfinite()
    if other is not None:
        finite &= other.isfinite()
    got, true = got[finite], true[finite]
    if not got.isfinite().all():
        return math.inf
    size = true.abs().square().sum().sqrt().item()
    wrong = (got - true).abs().square().sum().sqrt().item()
    return wrong / size if size > 1e-30 else wrong


def _same(one: Outcome, other: Outcome) -> bool:
    """Say whether two runs of the same program gave the same."""
    if _differs_in_shape(one, other):
        return False
    pairs = zip((*one.results, *one.gradients), (*other.results, *other.gradients), strict=True)
    return all(a is None or b is None or _equal(a, b) for a, b in pairs)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))


def _differs_in_shape(one: Outcome, other: Outcome) -> bool:
    mine, theirs = ((*o.results, *o.gradients) for o in (one, other))
    return [None if t is None else t.shape for t in mine] != [None if t is None else t.shape for t in theirs]


def _shapes(what: str, ours: tuple[Any, ...], eager: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    if len(ours) != len(eager):
        yield f"{what} number", f"{len(ours)} for {len(eager)}"
        return
    for i, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        if (mine is None) != (theirs is None):
            yield (
                f"{what} missing",
                f"#{i} {'None' if mine is None else 'a tensor'} for {'None' if theirs is None else 'a tensor'}",
            )
        if mine is None or theirs is None:
            continue
        for name in ("shape", "dtype", "layout", "requires_grad"):
            if getattr(mine, name) != getattr(theirs, name):
                yield f"{what} {name}", f"#{i} {getattr(mine, name)} for {getattr(theirs, name)}"
        dense = mine.layout == theirs.layout == torch.strided and mine.shape == theirs.shape
        if dense and not _lies_alike(mine, theirs):
            yield f"{what} strides", f"#{i} {mine.stride()} for {theirs.stride()} of {tuple(mine.shape)}"


def _lies_alike(mine: Tensor, theirs: Tensor) -> bool:
    """Say whether ``mine`` lies as ``theirs``, or as a cast of it: a value that leaves low precision is a copy.

    A copy keeps the order of the dimensions and has no gaps and no repeats: what eager returns as a view with strides
    of 0, or with gaps, is dense. Strides of dimensions of one element mean nothing.
    """
    return not mine.numel() or any(
        all(a == b for size, a, b in zip(mine.shape, mine.stride(), strides, strict=True) if size > 1)
        for strides in (theirs.stride(), torch.empty_like(theirs).stride(), theirs.contiguous().stride())
    )
