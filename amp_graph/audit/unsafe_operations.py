"""AMP4xx: operations that ran in low precision and that a list of ours denies it, with their errors on the real values.

Before: ``exp(x)`` of 30.0 in bfloat16. After: "a rounding of its input changes its result by 6 %".

Two errors are measured, as ``compare`` defines errors. That of the operation: its result against that of the same
operation on float32 copies of its inputs; one rounding of the result explains a part of it. And for functions that are
steep, what one more rounding of the inputs does to that float32 result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from amp_graph.audit.codes import finding
from amp_graph.audit.records import (
    LOW,
    Call,
    Event,
    Finding,
    Place,
    Tally,
    Watcher,
    dtype_name,
    name_of,
    tensors_in,
)
from amp_graph.audit.samples import sample
from amp_graph.lists import OpClass, effective
from amp_graph.lists.errors import Attempt
from amp_graph.numerics.differences import Sums
from amp_graph.numerics.exact_runs import first_of, in_full
from amp_graph.passes.graph.node_info import HALVES, is_mutable, is_random, schema_arguments
from amp_graph.passes.torch_compat.autograd import in_backward
from amp_graph.passes.torch_compat.storage import Memory

EXACT = {"bfloat16": 256, "float16": 2048}  # all whole numbers up to this are values of the dtype
MOST = 1 << 20  # elements of a sample
LARGEST = 1 << 22  # elements of an operation that is computed again as a whole
OWN = 4.0  # roundings of the result, beyond which an error is none of one rounding
STEEP = 8.0  # by which a function multiplies the rounding of its input
CANCELS = 32.0  # by which a difference does
REDUCTIONS = ("sum", "nansum", "mean", "nanmean", "linalg_vector_norm", "norm", "dot")  # that end a loss of one's own
FEW = 64  # numbers of a tensor in which terms of a loss are stacked

KINDS: dict[str, str] = {
    name: code
    for code, names in {
        "AMP401": "_log_softmax mse_loss smooth_l1_loss huber_loss nll_loss_forward nll_loss2d_forward "
        "soft_margin_loss multi_margin_loss multilabel_margin_loss_forward binary_cross_entropy_with_logits "
        "_ctc_loss binary_cross_entropy",
        "AMP402": "exp exp2 expm1 special_exp2 special_expm1 cosh sinh log log2 log10 log1p logit xlogy logsumexp "
        "special_xlog1py special_entr logaddexp logaddexp2 softplus pow sqrt rsqrt reciprocal acos asin acosh asinh "
        "atanh erfinv digamma lgamma",
        "AMP403": "sum nansum mean cumsum prod cumprod logcumsumexp _logcumsumexp index_add scatter_add scatter_reduce "
        "index_reduce index_put _embedding_bag _embedding_bag_forward_only trace",
        "AMP405": "sin cos tan",
        "AMP406": "_cdist_forward _pdist_forward _euclidean_dist var std var_mean std_mean linalg_vector_norm norm "
        "norm_except_dim _weight_norm_interface renorm",
    }.items()
    for name in names.split()
}
FIXES = {
    "AMP401": "compute the loss in float32: criterion(logits.float(), target)",
    "AMP402": "compute it in float32: give it x.float()",
    "AMP403": "accumulate in float32: x.sum(dtype=torch.float32), or a float32 tensor to add to",
    "AMP404": "keep positions, timesteps and counts in int64 or float32, and cast what is computed from them",
    "AMP405": "compute angles and their sine in float32, and cast the result: angles.float().sin()",
    "AMP406": "compute the difference and its square in float32: (a.float() - b.float())",
    "AMP407": "use binary_cross_entropy_with_logits, or log-softmax and logsigmoid of the logits in float32",
}

_FIX_LOSS = "compute the loss in float32: (prediction.float() - target.float()).pow(2).mean()"


@dataclass
class Errors:
    """The errors of an operation in a module: ``own``, and ``steep``, what a rounding of its inputs does to its result.

    Relative L2 errors over the looked-at steps. ``amplified``: by how much it may enlarge the rounding of its inputs.
    ``why``: the list's reason, "" if it does not deny.
    """

    operation: str
    module: str
    dtype: str
    amplified: float
    why: str = ""
    own: Sums = field(default_factory=Sums)
    steep: Sums = field(default_factory=Sums)

    @property
    def eps(self) -> float:
        """The largest relative error of one rounding; that of most is half of it."""
        return torch.finfo(getattr(torch, self.dtype)).eps / 2

    @property
    def severity(self) -> float:
        """How often the larger of both errors has what is allowed; above 1 it is none of one rounding."""
        return max(self.own.error / self.eps / OWN, self.steep.error * 2 / self.eps / self.amplified)

    def __str__(self) -> str:
        """Return what ran where, with the errors that count."""
        text = f"{self.operation} ran in {self.dtype}" + (f" in {self.module}" if self.module else "")
        if self.own.size:
            text += f": error {self.own.error:.2g}, {self.own.error / self.eps:.1f} times that of one rounding"
        if self.steep.error * 2 / self.eps > self.amplified:
            text += f"; one rounding of its inputs changes its result by {self.steep.error:.2g}"
        return text


def _compare(sums: Sums, result: Tensor, part: Callable[[Tensor], Tensor], real: Tensor | None) -> None:
    """Add the error of a real result to ``sums``; ``result``: that of ``part`` of the same inputs in float32.

    What is not finite is an overflow, which is another finding.
    """
    if real is not None and part(real).shape == result.shape:
        got, exact = (sample(t, MOST).double() for t in (part(real), result))
        is_finite = torch.isfinite(got)
        sums.add(torch.where(is_finite, got, 0.0), torch.where(is_finite, exact, 0.0))


Again = Callable[[Tensor | None], None]  # adds the error of the real result of an operation that was computed again
Reductions = dict[tuple[Place, str, str], None]  # that ran low, by line, name and dtype


@dataclass(eq=False)
class UnsafeOperations(Watcher):
    """Measures operations that ran in low precision."""

    _errors: dict[tuple[str, Place], dict[tuple[str, str], Errors]] = field(default_factory=dict)
    _rounded: dict[tuple[str, Place, str], Tally] = field(default_factory=dict)  # values, by the dtype that they lie in
    _losses: dict[Place, str] = field(default_factory=dict)  # the dtypes of low ones that a backward, or a scale, got
    _terms: Memory[Reductions] = field(default_factory=Memory)  # of losses in this step: the reductions behind them
    _reduced: Reductions = field(default_factory=dict)  # of which a loss was added up
    _again: Again | None = None  # of the operation that runs now, if it writes to its inputs

    def began(self) -> None:
        """Forget the losses of another step."""
        self._terms.clear()

    def heard(self, event: Event) -> None:
        """Note a loss that is in low precision, or has low terms; a scale that is on makes float32 of it."""
        given: Any = ()
        if event.name == "backward" and not event.is_after and not in_backward():
            given = event.arguments["tensors"]
        elif event.name == "scaler.scale" and not event.is_after:
            given = event.arguments["outputs"]
        losses = [t for t in tensors_in(given) if t.numel() == 1]
        terms = self._terms_of(losses)
        self._reduced |= terms
        low = [t for t in losses if t.dtype in HALVES]
        if low and not terms and event.place.file:
            self._losses.setdefault(event.place, dtype_name(low[0].dtype))

    def before(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compute again what writes to its inputs."""
        if call.phase == "forward" and LOW & {*call.inputs}:
            self._again = self._computed(call, operator, args, kwargs)

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Compute again what ran low."""
        again, self._again = self._again, None
        name = name_of(call.operator)
        if call.phase != "forward":
            return
        if self.training.records:
            self._follow(name, call, args, kwargs, first_of(result))
        if name == "binary_cross_entropy":
            self._probabilities(call, args[0])
        if call.output in LOW:
            exact = _whole_numbers(name, operator, args, kwargs)
            if exact is not None:
                self._positions(call, exact, result)
            if again is None and LOW & {*call.inputs} and not is_mutable(operator):
                again = self._computed(call, operator, args, kwargs)
            if again is not None:
                again(first_of(result))

    def _follow(
        self, name: str, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor | None
    ) -> None:
        """Follow a low reduction to one number through what it is weighted, stacked and added up in."""
        if result is None or result.numel() > FEW:
            return
        given = tensors_in((args, kwargs))
        terms = self._terms_of(given)
        if name in REDUCTIONS and call.output in LOW and result.numel() == 1 and given[0].numel() > 1:
            terms[call.place, name, call.output] = None
        if terms:
            self._terms.keep(result, terms)

    def _terms_of(self, tensors: Sequence[Tensor]) -> Reductions:
        return {one: None for terms in self._terms.of(tensors) for one in terms}

    def _computed(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Again | None:
        """Compute an operation in float32, and add what the rounding of its inputs does to the result."""
        name = name_of(call.operator)
        is_difference = name in ("sub", "rsub") and len(call.inputs) > 1 and LOW.issuperset(call.inputs)
        code = "AMP406" if is_difference else KINDS.get(name)
        if code is None or is_random(operator):
            return None
        dtype = next(one for one in call.inputs if one in LOW)
        errors = Errors(name, call.module, dtype, CANCELS if is_difference else STEEP)
        found = self._errors.setdefault((code, call.place), {}).setdefault((call.module, name), errors)
        if is_difference:
            _add_cancellation(found, *args[:2])
            return None
        found.why = found.why or _why_denied(operator, args, kwargs, dtype)
        part = _part(operator, args, kwargs)
        if part is None:
            return None
        moved: Tensor | None = None

        def taken(leaf: Any) -> Any:
            return in_full(part(leaf) if isinstance(leaf, Tensor) else leaf)

        with Attempt() as tried:
            wide_args, wide_kwargs = tree_map(taken, (list(args), dict(kwargs)))
            first = wide_args[0]
            if code in ("AMP402", "AMP405") and isinstance(first, Tensor) and _is_rounded(first, dtype):
                moved = first_of(operator(first * (1 + found.eps / 2), *wide_args[1:], **wide_kwargs))
            exact = first_of(operator(*wide_args, **wide_kwargs))
        if tried.error is not None:
            self.training.unseen[f"{operator} in float32: {tried.reason}"] = None
            return None
        if exact is not None and moved is not None:
            found.steep.add(torch.where(torch.isfinite(moved), moved, exact).double(), exact.double())
        return None if exact is None else functools.partial(_compare, found.own, exact, part)

    def _positions(self, call: Call, exact: Tensor, result: Tensor) -> None:
        """Count the whole numbers that were rounded."""
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        if largest > EXACT[call.output] and exact.shape == result.shape:
            wrong = exact[result.double() != exact]
            if not ((wrong == wrong[:1]) & (wrong < 0)).all():  # no mask, which also has none that is wrong
                self._count("AMP404", call, call.output, largest, wrong=wrong.numel(), values=exact.numel())

    def _probabilities(self, call: Call, given: Tensor) -> None:
        """Count probabilities of 0 and 1, if all are values of a low dtype."""
        p = sample(given, MOST)
        dtype = next((d for d in HALVES if bool((p.to(d).to(p.dtype) == p).all())), None)
        if dtype is not None and p.numel() > 1:
            self._count(
                "AMP407", call, dtype_name(dtype), 1.0, wrong=int(((p == 0) | (p == 1)).sum()), values=p.numel()
            )

    def _count(self, code: str, call: Call, dtype: str, largest: float, **counts: int) -> None:
        self._rounded.setdefault((code, call.place, dtype), Tally(call)).add(call, largest, **counts)

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield what is beyond one rounding as a warning, and what else the list denies as a note."""
        is_told = False  # the operation of a loss, and so its backward need not be
        places: set[Place] = set()  # of what is told, where a reduction of a loss need not be
        for (code, place), errors in self._errors.items():
            bad = [e for e in errors.values() if e.severity > 1 or e.why]
            bad.sort(key=lambda e: -e.severity)
            for worst in bad[:1]:
                places |= {place} if code == "AMP401" or worst.severity > 1 else set()
                yield finding(
                    code, place,
                    str(worst) + (f"; and {len(bad) - 1} more here" if bad[1:] else ""), FIXES[code],
                    level="warning" if worst.severity > 1 else "note",
                    also=[f"{e.module}: {e.operation}".removeprefix(": ") for e in bad[1:]], dtype=worst.dtype,
                    operation=worst.operation, error=worst.own.error, roundings=worst.own.error / worst.eps,
                    error_of_inputs=worst.steep.error, reason=worst.why,
                )  # fmt: skip
            is_told |= bool(bad) and code == "AMP401"
        low = [
            *((place, dtype, "this loss is") for place, dtype in self._losses.items() if not is_told),
            *((place, dtype, f"{name} of a loss ran") for place, name, dtype in self._reduced if place not in places),
        ]
        for place, dtype, what in low:
            digits = int(-math.log10(torch.finfo(getattr(torch, dtype)).eps / 2))
            text = f"{what} in {dtype}, which has {digits} to {digits + 1} digits"
            yield finding("AMP401", place, text, _FIX_LOSS, level="note", dtype=dtype, digits=digits)
        for (code, place, dtype), rounded in self._rounded.items():
            wrong, values = rounded.counts["wrong"], rounded.counts["values"]
            share = wrong / values
            texts = {
                "AMP404": f"{share:.0%} of the positions or counts up to {rounded.largest:.0f} are rounded in {dtype}, "
                f"which holds all whole numbers only to {EXACT[dtype]}",
                "AMP407": f"the probabilities were rounded to {dtype}, and {share:.1%} of them are 0 or 1",
            }
            yield finding(
                code, place, texts[code], FIXES[code],
                level="warning" if wrong else "note", also=list(rounded.modules)[1:], dtype=dtype,
                share=share, values=values, largest=rounded.largest,
            )  # fmt: skip


# -- operations once more, in float32 -------------------------------------------------------------------------


def _part(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """Return what takes a part of the inputs, and of the result: elements, rows, or all of it; None if that is large.

    Rare elements, in which a relative error may lie, can be missing in a part.
    """
    given = [t for t in tensors_in((args, kwargs)) if t.dim()]
    if not given or max(t.numel() for t in given) <= MOST:
        return lambda t: t
    if torch.Tag.pointwise in operator.tags and len({t.shape for t in given}) == 1:
        return lambda t: sample(t, MOST)
    dims = schema_arguments(operator, tuple(args), dict(kwargs)).get("dim")
    first = given[0]
    over = {d % first.dim() for d in (dims if isinstance(dims, (list, tuple)) else [dims]) if isinstance(d, int)}
    if len(given) == 1 and over and 0 not in over:
        apart = -(-first.numel() // MOST)
        return lambda t: t[::apart] if t.dim() else t
    return (lambda t: t) if sum(t.numel() for t in given) <= LARGEST else None


def _why_denied(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: str) -> str:
    """Return why the default list of a dtype and device denies an operation; "" if it does not."""
    device = "cpu" if tensors_in((args, kwargs))[0].device.type == "cpu" else "cuda"
    rule = effective((), dtype=dtype, device=device).lookup(
        operator, schema_arguments(operator, tuple(args), dict(kwargs))
    )
    return rule.why if rule is not None and rule.cls is OpClass.DENY else ""


def _add_cancellation(found: Errors, a: Any, b: Any) -> None:
    """Add what one rounding of two tensors does to their difference."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or max(a.numel(), b.numel()) > LARGEST:
        return
    if not _is_rounded(a, found.dtype) and not _is_rounded(b, found.dtype):
        return
    x, y = (sample(t, MOST).float() for t in torch.broadcast_tensors(a, b))
    is_finite = torch.isfinite(x) & torch.isfinite(y)
    x, y = torch.where(is_finite, x, 0.0), torch.where(is_finite, y, 0.0)
    found.steep.wrong += (found.eps / 2) ** 2 * float(x.square().sum() + y.square().sum())
    found.steep.size += float((x - y).square().sum())


def _whole_numbers(name: str, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the exact result of an operation that makes whole numbers of a low dtype; None of any other."""
    if name == "arange":
        return first_of(operator(*args, **{**kwargs, "dtype": torch.float64}))
    if name in ("_to_copy", "copy"):
        given: Tensor = args[1 if name == "copy" else 0]
        return given if given.dtype not in HALVES and _is_whole(given) else None
    is_sum = name in ("sum", "cumsum") and not is_mutable(operator)
    if is_sum and args[0].dtype in HALVES and args[0].numel() <= LARGEST and _is_whole(args[0]):
        return first_of(operator(args[0].double(), *args[1:], **{**kwargs, "dtype": None}))
    return None


def _is_whole(given: Tensor) -> bool:
    """Say whether all elements are whole numbers; most tensors show by a few that they are not."""
    if not given.is_floating_point():
        return not given.is_complex() and given.dtype != torch.bool
    few = given[(0,) * (given.dim() - 1)][:16] if given.dim() and given.numel() else given
    wide = (t.float() if t.element_size() == 1 else t for t in (few, given))  # float8 has no kernel for that
    return all(bool((part == part.round()).all()) for part in wide)


def _is_rounded(given: Tensor, dtype: str) -> bool:
    """Say whether low values may be rounded ones: small whole numbers are exact."""
    return not _is_whole(given) or bool((given.abs() > EXACT[dtype]).any())
