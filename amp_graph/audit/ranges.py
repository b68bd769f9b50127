"""AMP5xx: low values that overflowed or came near the end of their dtype, and float16 values that underflowed.

Before: ``scores`` of 9,000 in float16. After: "a value of 9,000: 7 times as large is infinite in float16".

Values at the negative end are masks where an input held such values already, and no finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.audit.codes import finding
from amp_graph.audit.records import CONVERSION, Call, Finding, Place, Tally, Watcher, name_of
from amp_graph.audit.samples import sample
from amp_graph.numerics.exact_runs import first_of
from amp_graph.passes.calibration.ranges import LIMITS, MASK, range_of
from amp_graph.passes.graph.node_info import FLOATS, HALVES, is_view

Ends = tuple[float, float, bool]  # the least and the largest number of an argument; whether it is in low precision
NEAR = 8.0  # the factor to the end of a dtype
MOST = 1 << 14  # elements of a sample
MANY = 0.1  # the share of values that underflowed, beyond which it is told
SOME = 0.01  # the share of subnormal values, beyond which zeros beside them count as underflowed
# Makes memory without values, or writes what was asked for.
CONSTANTS = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided resize full full_like fill new_full zeros ones "
    "scalar_tensor masked_fill index_fill zero lift_fresh clone detach".split()
)
# Between 0 and 1, where what is tiny beside 1 is as good as 0.
PROBABILITIES = frozenset("_softmax _safe_softmax sigmoid exp _scaled_dot_product_flash_attention_for_cpu".split())
# A sum of products is exactly 0 by chance only.
PRODUCTS = frozenset("mm addmm bmm baddbmm convolution convolution_backward _log_softmax_backward_data".split())


def share_of_tiny(found: Tally) -> float:
    """Return the part of float16 values that underflowed: that lost bits, or became 0."""
    elements, subnormal, zeros = (found.counts[name] for name in ("elements", "subnormal", "zeros"))
    if subnormal < SOME * elements:
        return subnormal / elements if elements else 0.0
    return (subnormal + zeros) / (elements + zeros)


@dataclass(eq=False)
class Ranges(Watcher):
    """Looks at the largest and the smallest values of results in low precision."""

    _infinite: dict[Place, Tally] = field(default_factory=dict)
    _near: dict[Place, Tally] = field(default_factory=dict)
    _tiny: dict[tuple[str, Place], Tally] = field(default_factory=dict)  # by phase
    _overwritten: list[Ends] = field(default_factory=list)  # what the operation that runs now writes to, before that

    def before(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the ends of what will be overwritten; those of a copy's target do not matter."""
        self._overwritten.clear()
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.dtype in HALVES and call.operator != "aten.copy_.default":
            self._overwritten.append(_ends(target))

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take the result of an operation."""
        name = name_of(call.operator)
        out = first_of(result)
        if out is None or out.dtype not in HALVES or not out.numel() or call.phase == "update":
            return
        if name in CONSTANTS or is_view(operator):
            return
        (low, high, _), near = _ends(out), LIMITS[call.output] / NEAR
        if not -near < low <= high < near:
            inputs = [_ends(leaf) for leaf in tree_leaves((args, kwargs)) if leaf is not out]
            self._take_large(call, out, (low, high), inputs + self._overwritten)
        elif out.dtype == torch.float16 and name not in PROBABILITIES:
            self._take_tiny(call, name, args, out)
        self._overwritten.clear()

    def _take_large(self, call: Call, out: Tensor, ends: tuple[float, float], inputs: Sequence[Ends]) -> None:
        """Take a result that is infinite or near the end, unless it is a mask, or an input was so already."""
        near, (low, high) = LIMITS[call.output] / NEAR, ends
        if not all(abs(end) < math.inf for *both, _ in inputs for end in both):
            return
        is_mask = any(least <= (-near if is_low else MASK) for least, _, is_low in inputs)
        if call.operator == CONVERSION and low <= -near:
            most = out[out <= -near]
            is_mask = is_mask or (most.numel() > 1 and bool((most == low).all()))
        largest = high if is_mask else max(high, -low)
        if math.isnan(high) or math.isinf(largest):
            into, largest = self._infinite, math.inf
        elif largest >= near and not any(max(most, -least) >= near for least, most, is_low in inputs if is_low):
            into = self._near
        else:
            return
        into.setdefault(call.place, Tally(call)).add(call, largest, times=1)

    def _take_tiny(self, call: Call, name: str, args: Sequence[Any], out: Tensor) -> None:
        part = _part(out)
        measured = range_of([part.float()])
        if measured is None:
            return
        nonzero = measured.elements - measured.zeros
        subnormal = round(measured.fractions("float16")["subnormal"] * nonzero)
        counts = {"elements": nonzero, "subnormal": subnormal, "zeros": _made_zero(name, args, part, out)}
        self._tiny.setdefault((call.phase, call.place), Tally(call)).add(call, **counts)

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield overflows by their place, and of near ends and underflows the worst place, with the others."""
        for place, found in self._infinite.items():
            by_scale = bool(self.training.scaled) and found.call.phase == "backward"
            yield finding(
                "AMP501", place,
                f"{_where(found)} of finite inputs was infinite or NaN in {found.call.output} {found.counts['times']} "
                f"times in {found.call.phase}" + (", where the loss scale may be too large as yet" if by_scale else ""),
                _FIX_LARGE,
                level="note" if by_scale else "warning", also=list(found.modules)[1:], **_evidence(found),
            )  # fmt: skip
        near = {p: f for p, f in self._near.items() if not (self.training.scaled and f.call.phase == "backward")}
        for place, found in list(near.items())[:1]:  # what reads it is near the end, too
            dtype = found.call.output
            yield finding(
                "AMP502", place,
                f"{_where(found)} reached {found.largest:.3g} in {found.call.phase}: {dtype} ends at "
                f"{LIMITS[dtype]:.3g}" + _others(len(near) - 1),
                _FIX_LARGE,
                also=[str(p) for p in list(near)[1:]], **_evidence(found),
            )  # fmt: skip
        off = {} if self.training.scaled else self.training.off
        for phase, code in (("forward", "AMP503"), ("backward", "AMP504")):
            shares = {place: share_of_tiny(f) for (when, place), f in self._tiny.items() if when == phase}
            tiny = sorted((p for p, share in shares.items() if share >= MANY), key=lambda p: -shares[p])
            for place in tiny[:1]:
                found, share = self._tiny[phase, place], shares[place]
                level = "warning" if phase == "backward" and not self.training.scaled else "note"
                what = "gradients" if phase == "backward" else "values"
                yield finding(
                    code, place,
                    f"{share:.0%} of the float16 {what} of {_where(found)} became 0 or subnormal, which is below 6e-5"
                    + _others(len(tiny) - 1) + ("".join(f"; {why}" for why in off) if phase == "backward" else ""),
                    (", ".join(off.values()) or _FIX_SCALE) if phase == "backward" else _FIX_SMALL,
                    level=level, also=[str(p) for p in tiny[1:]], share=share, values=found.counts["elements"],
                    operation=name_of(found.call.operator),
                )  # fmt: skip


_FIX_LARGE = "compute it in bfloat16 or float32, or scale its inputs down"
_FIX_SCALE = "scale the loss: scaler.scale(loss).backward()"
_FIX_SMALL = "compute it in bfloat16 or float32, or scale its inputs up"


def _others(count: int) -> str:
    return f"; and at {count} other places" if count else ""


def _where(found: Tally) -> str:
    first = next(iter(found.modules), "")
    return name_of(found.call.operator) + (f" in {first}" if first else "")


def _evidence(found: Tally) -> dict[str, Any]:
    return {
        "dtype": found.call.output, "operation": name_of(found.call.operator), "phase": found.call.phase,
        "largest": found.largest, "times": found.counts["times"],
    }  # fmt: skip


def _ends(leaf: Any) -> Ends:
    """Return the ends of an argument; a positive whole number may be a size, and counts as 0."""
    if isinstance(leaf, Tensor) and leaf.dtype in FLOATS and leaf.numel():
        low, high = torch.stack(torch.aminmax(leaf)).tolist()
        return low, high, leaf.dtype in HALVES
    if isinstance(leaf, float):
        return leaf, leaf, True
    return (min(leaf, 0), 0.0, True) if isinstance(leaf, int) else (0.0, 0.0, True)


def _part(tensor: Tensor) -> Tensor:
    """Return a sample in the order of memory, so that no tensor is copied to be read in another."""
    return sample(tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)), MOST)


def _made_zero(name: str, args: Sequence[Any], part: Tensor, out: Tensor) -> int:
    """Return how many zeros of a sample are of values that were not 0."""
    if name in PRODUCTS:
        return int((part == 0).sum())
    if name not in ("_to_copy", "mul", "div"):
        return 0
    zero, layout = part == 0, (out.shape, out.stride())
    factors = [_part(t) for t in args[:2] if isinstance(t, Tensor) and (t.shape, t.stride()) == layout]
    for factor in factors:
        zero &= factor != 0
    return int(zero.sum()) if factors else 0
