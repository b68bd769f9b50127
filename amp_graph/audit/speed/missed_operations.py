"""AMP6xx: matrix products, convolutions and attention that ran in full precision, though a list allows them lower.

Before: ``aten.addmm`` in float32 at ``train.py:42``, outside of the region that covers the rest of the model. After:
AMP601, with the seconds that low precision is predicted to save on this machine, or that it saves none. Products of a
model that is called outside of the region are told once, at the line of the call: AMP105.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from amp_graph.audit.codes import finding
from amp_graph.audit.model_calls import ModelCalls
from amp_graph.audit.records import (
    CONVERSION,
    FULL,
    LOW,
    NOWHERE,
    Call,
    Event,
    Finding,
    Place,
    Totals,
    tensors_in,
)
from amp_graph.audit.speed.predicted_time import (
    LEAST_SHARE,
    dtype_of,
    family_of,
    is_product,
    seconds_of,
    seconds_of_casts,
    seconds_of_steps,
)
from amp_graph.lists import OpClass, load
from amp_graph.passes.precision.machine_rates import Machine, machine_for
from amp_graph.passes.precision.predict_time import WORTH_IT
from amp_graph.passes.torch_compat.storage import Memory

LARGE_SHARE = 0.05  # of the predicted time of the looked-at steps: what could be saved of it is worth a warning
CASTS_OF_TRAINING = 2  # what forward casts down, backward casts up: gradients
IN_FULL_PRECISION = {
    "AMP601": ("outside of every autocast region", "call it inside of the region that covers the rest"),
    "AMP602": (
        "in a region with enabled=False",
        "leave only what needs full precision, a loss or a norm, in the disabled region",
    ),
    "AMP603": (
        "which autocast leaves as it is",
        "make what it reads in float32: NumPy's arrays and Python's numbers are float64",
    ),
    "AMP604": (
        "because an operand is cast up at this line",
        "cast its result instead, in the region if there is one: head(x).float()",
    ),
    "AMP605": (
        "inside of an autocast region, which has no rule for this form of it",
        "cast the operands yourself, or call a form that autocast knows: torch.matmul, not in place and without out=",
    ),
}
LISTED_AS = {  # what torch makes of them has names of its own
    "attention": "aten.scaled_dot_product_attention",
    "convolution": "aten.convolution",
    "aten._grouped_mm": "transformers.grouped_mm_fallback",
}


Counted = tuple[Call, Totals]
Missed = list[Counted]  # products in full precision with one cause at one line: those of forward, then of backward


@dataclass(eq=False)
class MissedOperations(ModelCalls):
    """Looks at the dtype of each product, and at what cast its operands up."""

    _group: int = -1  # of the last cast up
    _up: Memory[tuple[Call, int]] = field(
        default_factory=Memory
    )  # what was cast up in this step, and its call of torch
    _cast_up: dict[Call, Call] = field(default_factory=dict)  # products that read it, and the cast
    _inside: set[Call] = field(default_factory=set)  # torch itself cast it, as in attention without a fused kernel
    _devices: Counter[str] = field(default_factory=Counter)

    def began(self) -> None:
        """Forget what was cast up in another step."""
        self._up.clear()

    def heard(self, event: Event) -> None:
        """Take the call of a model, and whether the script cast its inputs up."""
        if event.name == "model.call":
            casts = self._marked(event.arguments.get("args"))
            self.take_call(event, is_raised=any(not one.library and not one.module for one, _ in casts))

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember what was cast up, and which product reads it."""
        super().ran(call, operator, args, kwargs, result)
        if call.operator == CONVERSION:
            if call.phase == "forward" and call.output in FULL and LOW & {*call.inputs[:1]}:
                self._mark(result, call)
        elif is_product(call):
            self._devices[result.device.type if isinstance(result, Tensor) else "cpu"] += 1
            for cast, group in self._marked((args, kwargs)):
                self._cast_up.setdefault(call, cast)
                if group == self.training.group:
                    self._inside.add(call)
        elif self._group == self.training.group and (marked := self._marked((args, kwargs))):
            self._mark(result, marked[0][0])  # scaled or copied, before the product in the same call of torch

    def _mark(self, wide: Any, call: Call) -> None:
        for t in tensors_in(wide):
            if t.is_floating_point() and self._up.known(t) is None:
                self._group = self.training.group
                self._up.keep(t, (call, self._group))

    def _marked(self, values: Any) -> list[tuple[Call, int]]:
        return self._up.of(tensors_in(values)) if self._up else []

    def findings(self) -> Iterator[Finding]:
        """Yield what ran in full precision and need not."""
        calls = {call: totals for call, totals in self.training.calls.items() if call.phase != "update"}
        products = {call: totals for call, totals in calls.items() if is_product(call) and self._is_allowed(call)}
        machine = machine_for(self._device)
        count: Counter[str] = Counter()
        for call, totals in products.items():
            count[dtype_of(call)] += totals.calls
        lowest = max((d for d in count if d in LOW), key=count.__getitem__, default="")
        outside = self.outside()
        grouped = self._grouped(products, {call: called.place for called in outside for call in called.full})
        for called in outside:
            seconds, gain, _ = self._gain(grouped.pop(("AMP105", called.place), []), machine, lowest or "bfloat16")
            text = gain if seconds["seconds"] else ""
            yield self.finding_of(called, text, is_large=seconds["share"] > LARGE_SHARE)
        for (code, place), missed in grouped.items():
            if lowest or (code == "AMP603" and "float32" in count):
                yield from self._told(code, place, missed, machine, lowest or "float32")
        is_on = any(one.enabled and one.device == self._device for one in self.training.regions)
        if products and not lowest and not is_on:
            yield self._unused(products, machine)

    @property
    def _device(self) -> str:
        return self._devices.most_common(1)[0][0] if self._devices else "cpu"

    def _is_allowed(self, call: Call) -> bool:
        """Say whether the list for the device allows this product in bfloat16; backward's follow from forward's."""
        rules = load("default", dtype="bfloat16", device="cuda" if self._device == "cuda" else "cpu").rules
        packet = ".".join(call.operator.split(".")[:2]).rstrip("_")
        name = LISTED_AS.get(packet) or LISTED_AS.get(family_of(call.operator), packet)
        return any(rule.cls is OpClass.ALLOW for rule in rules.get(name, ()))

    def _grouped(
        self, products: Mapping[Call, Totals], outside: Mapping[Call, Place]
    ) -> dict[tuple[str, Place], Missed]:
        """Return the products in full precision by cause and line; a backward is with its forward.

        ``outside``: products of models that are called outside of the region, with the line of the call.
        """
        found: dict[tuple[str, Place], Missed] = {}
        of_forward: dict[tuple[str, Place], Missed] = {}
        full = [(call, totals) for call, totals in products.items() if dtype_of(call) in FULL]
        for call, totals in full:
            if call.phase == "forward" and call not in self._inside:
                of_forward[call.module, call.place] = found.setdefault(self._cause(call, outside), [])
                of_forward[call.module, call.place].append((call, totals))
        for call, totals in full:
            if call.phase == "backward" and (call.module, call.place) in of_forward:
                of_forward[call.module, call.place].append((call, totals))
        return found

    def _cause(self, call: Call, outside: Mapping[Call, Place]) -> tuple[str, Place]:
        if "float64" in call.inputs:
            return "AMP603", call.place
        around = next((one for one in self.training.outwards(call.region) if one.device == self._device), None)
        if around is not None:
            return "AMP605" if around.enabled else "AMP602", call.place
        if call in self._cast_up:
            return "AMP604", self._cast_up[call].place
        return ("AMP105", outside[call]) if call in outside else ("AMP601", call.place)

    def _gain(self, missed: Missed, machine: Machine, dtype: str) -> tuple[dict[str, float], str, float]:
        """Return what ``dtype`` is predicted to save of products, and that in words; of none, nothing.

        The seconds as they ran, and in ``dtype``, and which ``share`` of the looked-at steps' time is saved. With them,
        their part of that time.
        """
        full, lower = _seconds(missed, machine, dtype)
        steps = max(seconds_of_steps(self.training.calls, machine), 1e-30)
        share = (full - lower) / steps
        whole = "what was looked at" if self.training.evaluated else "the step"
        saves = f", which saves {share:.1%} of {whole}" if share > 0 else ": it is not profitable on this machine"
        takes = f"; {dtype} is predicted to take {lower / (full or 1.0):.2f} of their time on {machine.name}"
        figures = {"seconds": full, "seconds_low": lower, "share": share}
        return figures, f"{takes}, casts included{saves}", full / steps

    def _told(self, code: str, place: Place, missed: Missed, machine: Machine, dtype: str) -> Iterator[Finding]:
        seconds, gain, part = self._gain(missed, machine, dtype)
        if min(part, abs(seconds["share"])) < LEAST_SHARE:  # a loss is told, too: a form to leave as it is
            return
        forward = _of_forward(missed)
        flops, count = sum(t.flops for _, t in missed), sum(t.calls for _, t in forward)
        where, fix = IN_FULL_PRECISION[code]
        if code == "AMP604" and (libraries := {self._cast_up[call].library for call, _ in forward} - {""}):
            where += f", in {', '.join(sorted(libraries))}, called from it"
        wider = "float64" if code == "AMP603" else "float32"
        names = ", ".join(sorted({".".join(call.operator.split(".")[:2]) for call, _ in forward}))
        large = seconds["share"] > LARGE_SHARE and code != "AMP602"  # which was asked for
        yield finding(
            code, place,
            f"{names} ran in {wider}, {where}, while other products ran in {dtype} (calls a step: "
            f"{count / self.training.looks:g}, with backward {flops / self.training.looks:.2g} FLOP){gain}",
            fix,
            level="warning" if large else "note",
            also=sorted({call.module for call, _ in forward if call.module}), calls=count, flops=flops,
            dtype=wider, machine=machine.name, **seconds,
        )  # fmt: skip

    def _unused(self, products: Mapping[Call, Totals], machine: Machine) -> Finding:
        full, lower = _seconds([*products.items()], machine, "bfloat16")
        steps = seconds_of_steps(self.training.calls, machine)
        speed = steps / max(steps - full + lower, 1e-30)
        place = max(products, key=lambda call: products[call].flops).place
        fix = "with torch.autocast(device, torch.bfloat16) around the forward, or amp_graph.convert(model)"
        return finding(
            "AMP606", place or NOWHERE,
            f"no product ran in low precision; in bfloat16 the step is predicted to have {speed:.2f} times its present "
            f"speed on {machine.name}",
            fix if speed >= WORTH_IT else "none: low precision does not pay on this machine for these sizes",
            level="note", speed=speed, flops=sum(t.flops for t in products.values()), machine=machine.name,
        )  # fmt: skip


def _of_forward(missed: Missed) -> Missed:
    return [one for one in missed if one[0].phase == "forward"]


def _seconds(missed: Missed, machine: Machine, dtype: str) -> tuple[float, float]:
    """Return the predicted time of products as they ran, and in ``dtype``, with casts of all that forward touches."""
    full = sum(seconds_of(call, totals, machine) for call, totals in missed)
    lower = sum(seconds_of(call, totals, machine, dtype) for call, totals in missed)
    forward = _of_forward(missed)
    size = sum(t.bytes / (2 if "float64" in call.inputs else 1) for call, t in forward)
    count = sum(2 * t.calls for _, t in forward)
    casts = seconds_of_casts(size, count, machine, dtype) * (CASTS_OF_TRAINING if len(missed) > len(forward) else 1)
    return full, lower + casts
