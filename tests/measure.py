"""Measure a model against fp64: errors of outputs and gradients, per parameter, and ratios to a baseline.

    ours = run(case, seed, amp_graph.convert)
    theirs = run(case, seed, context=lambda: torch.autocast("cpu", torch.bfloat16))
    gradient_errors(ours, reference(case, seed))["layer.0.weight"]

What is executed (casts, dtypes, saved bytes) is measured in `measure_casts.py` and `measure_dtypes.py`, and
re-exported here.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.corpus import CASES, Case, make, to_double
from tests.corpus.losses import float_leaves
from tests.measure_casts import CastCounter, saved_bytes
from tests.measure_dtypes import PRODUCTS, DtypeLog, compare, products

# What callers import from here, the two neighbours' included.
__all__ = [
    "PRODUCTS",
    "CastCounter",
    "DtypeLog",
    "Ratios",
    "Run",
    "compare",
    "error_ratio",
    "global_gradient_error",
    "gradient_errors",
    "output_error",
    "products",
    "reference",
    "run",
    "saved_bytes",
    "to_device",
    "zero_gradients",
]  # fmt: skip

Prepare = Callable[[nn.Module], nn.Module]
Context = Callable[[], AbstractContextManager]

# A gradient whose elements are this much smaller than the average one is zero in exact arithmetic. In fp64
# such gradients come out at 1e-14 and less, in fp32 (cases tagged "no_fp64", parts that models force to
# fp32) at 1e-7; the smallest true gradient of the corpus is at 5e-3.
ZERO_GRADIENT = 1e-5
# Below this, an error is that of fp32 arithmetic and says nothing about precision choices; ratios start here.
SMALLEST_ERROR = 1e-6


@dataclass(frozen=True)
class Run:
    """What one step produced, as fp64 copies: the output's float tensors, the loss, all gradients."""

    outputs: tuple[torch.Tensor, ...]
    loss: float
    grads: dict[str, torch.Tensor]


def _identity(obj: Any) -> Any:
    return obj


def _copy64(t: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(t) if t.is_complex() else t).detach().to("cpu", torch.float64, copy=True)


def run(
    case: Case | str,
    seed: int = 0,
    prepare: Prepare = _identity,
    context: Context = nullcontext,
    *,
    inputs: Callable[[Any], Any] = _identity,
    loss_scale: float = 1.0,
    device: str | torch.device = "cpu",
) -> Run:
    """Run one step of a case: forward and loss inside `context`, backward outside, as users of autocast do.

    `loss_scale` multiplies the loss before backward and divides the gradients after, in fp64: with fp16,
    small gradients would otherwise be lost, and that is not what is compared here.
    """
    case = CASES[case] if isinstance(case, str) else case
    model, positional, keyword = make(case, seed)
    model.to(device)
    # The original module's parameters, by its own names: a wrapper made by `prepare` may rename them.
    parameters = dict(model.named_parameters())
    prepared = prepare(model)
    positional, keyword = to_device(inputs((positional, keyword)), device)
    torch.manual_seed(seed + 20_000)
    with context():
        out = prepared(*positional, **keyword)
        loss = case.loss(out)
    outputs = tuple(_copy64(leaf) for leaf in float_leaves(out))
    if loss.requires_grad:
        (loss * loss_scale).backward()
    grads = {name: _copy64(p.grad) / loss_scale for name, p in parameters.items() if p.grad is not None}
    return Run(outputs, loss.item(), grads)


def to_device(obj: Any, device: str | torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), obj)


def reference(case: Case | str, seed: int = 0, *, device: str | torch.device = "cpu") -> Run:
    """The same step in fp64: what mixed precision is compared with (fp32 for cases tagged "no_fp64")."""
    case = CASES[case] if isinstance(case, str) else case
    if "no_fp64" in case.tags:
        return run(case, seed, device=device)
    return run(case, seed, lambda model: model.double(), inputs=to_double, device=device)


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(t.square().sum().item() for t in tensors))


def output_error(got: Run, ref: Run) -> float:
    """Relative L2 error over all float outputs together."""
    if [o.shape for o in got.outputs] != [o.shape for o in ref.outputs]:
        raise ValueError("outputs differ in shape or number from the reference's")
    wrong = _norm(a - b for a, b in zip(got.outputs, ref.outputs, strict=True))
    size = _norm(ref.outputs)
    return wrong / size if size else wrong


def _per_element(ref: Run) -> float:
    """Root mean square of all gradient elements together."""
    count = sum(g.numel() for g in ref.grads.values())
    return _norm(ref.grads.values()) / math.sqrt(count) if count else 0.0


def zero_gradients(ref: Run) -> frozenset[str]:
    """Parameters whose gradient is zero in exact arithmetic.

    The bias before a batch norm and the key bias of attention move nothing: their gradients cancel exactly,
    and what any arithmetic returns for them is its own rounding noise.
    """
    level = ZERO_GRADIENT * _per_element(ref)
    return frozenset(name for name, g in ref.grads.items() if _norm([g]) <= level * math.sqrt(g.numel()))


def gradient_errors(got: Run, ref: Run) -> dict[str, float]:
    """Relative L2 error of each parameter's gradient; a missing one has error 1, a surplus one is refused.

    Each parameter is measured by its own true gradient, because a norm over all of them hides a lost bias
    behind a large embedding. Where the true gradient is zero (see `zero_gradients`) there is nothing to be
    relative to: noise over noise would be any number, about 1 at best, and would drown every other
    parameter in a maximum. Such a parameter is measured by what an average parameter of its size carries:
    the root mean square of all gradient elements times the root of its number of elements. That is how
    harmful its noise is to an optimizer's step. No floor applies to gradients that are merely small:
    diluting their errors would hide, for example, an underflow in fp16. The two kinds lie orders of
    magnitude apart, so the level is not delicate.
    """
    surplus = got.grads.keys() - ref.grads.keys()
    if surplus:
        raise ValueError(f"parameters with a gradient that the reference has not: {sorted(surplus)}")
    zero, typical = zero_gradients(ref), _per_element(ref)
    errors = {}
    for name, true in ref.grads.items():
        wrong = _norm([got.grads[name] - true]) if name in got.grads else _norm([true])
        size = typical * math.sqrt(true.numel()) if name in zero else _norm([true])
        errors[name] = wrong / size if size else wrong
    return errors


def global_gradient_error(got: Run, ref: Run) -> float:
    """Relative L2 error over all gradients together: for reports only, it hides small parameters."""
    wrong = _norm(got.grads[n] - g if n in got.grads else g for n, g in ref.grads.items())
    size = _norm(ref.grads.values())
    return wrong / size if size else wrong


@dataclass(frozen=True)
class Ratios:
    """Errors of ours over errors of the baseline, each the RMS over seeds; 1 is equal, below 1 is better.

    `gradient` has a ratio per parameter, without those whose true gradient is zero: theirs is a quotient of
    two noises. Those do count in `gradient_worst`: the largest error of any parameter over the baseline's
    largest.
    """

    output: float
    gradient: dict[str, float]
    gradient_worst: float
    ours_output: float
    theirs_output: float
    ours_gradient: dict[str, float] = field(repr=False)
    theirs_gradient: dict[str, float] = field(repr=False)

    @property
    def gradient_median(self) -> float:
        return statistics.median(self.gradient.values()) if self.gradient else 1.0

    @property
    def gradient_max(self) -> float:
        return max(self.gradient.values(), default=1.0)

    def __str__(self) -> str:
        name = max(self.gradient, key=self.gradient.get, default="-")
        return (
            f"output {self.output:.3f} ({self.ours_output:.2e} / {self.theirs_output:.2e}), "
            f"gradients median {self.gradient_median:.3f} max {self.gradient_max:.3f} at {name}, "
            f"worst / worst {self.gradient_worst:.3f}"
        )


def error_ratio(
    case: Case | str,
    prepare: Prepare,
    baseline_context: Context,
    seeds: Iterable[int] = (0, 1, 2),
    *,
    loss_scale: float = 1.0,
    device: str | torch.device = "cpu",
    baseline: Prepare = _identity,
) -> Ratios:
    """Compare a prepared model with the plain one in `baseline_context` (autocast), both against `reference`.

    Or with what `baseline` prepares. RMS over seeds, because the error of one step is one draw of a random number.
    """
    ours, theirs, zero = [], [], set()
    for seed in seeds:
        ref = reference(case, seed, device=device)
        a = run(case, seed, prepare, loss_scale=loss_scale, device=device)
        b = run(case, seed, baseline, baseline_context, loss_scale=loss_scale, device=device)
        ours.append((output_error(a, ref), gradient_errors(a, ref)))
        theirs.append((output_error(b, ref), gradient_errors(b, ref)))
        zero |= zero_gradients(ref)
    our_output, our_gradient = _over_seeds(ours)
    their_output, their_gradient = _over_seeds(theirs)
    return Ratios(
        _ratio(our_output, their_output),
        {name: _ratio(our_gradient[name], e) for name, e in their_gradient.items() if name not in zero},
        _ratio(max(our_gradient.values(), default=0.0), max(their_gradient.values(), default=0.0)),
        our_output,
        their_output,
        our_gradient,
        their_gradient,
    )


def _over_seeds(runs: list[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """Root mean square of the errors; a parameter that some seed gave no gradient counts where it has one."""
    names = dict.fromkeys(name for _, errors in runs for name in errors)
    gradient = {name: _rms([errors[name] for _, errors in runs if name in errors]) for name in names}
    return _rms([output for output, _ in runs]), gradient


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def _ratio(ours: float, theirs: float) -> float:
    """NaN stays NaN: `max` would drop it."""
    if math.isnan(ours) or math.isnan(theirs):
        return math.nan
    return max(ours, SMALLEST_ERROR) / max(theirs, SMALLEST_ERROR)
