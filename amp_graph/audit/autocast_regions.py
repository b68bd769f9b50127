"""AMP101 to AMP104, AMP106: regions of ``torch.autocast`` that do nothing, fight, or hold a backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.audit.codes import finding
from amp_graph.audit.records import LOW, Call, Event, Finding, Place, Region, Watcher, name_of, tensors_in
from amp_graph.lists import OpClass, load
from amp_graph.passes.torch_compat.autograd import in_backward

COMPUTES = (OpClass.ALLOW, OpClass.DENY, OpClass.FP32_INSIDE)  # the others move values, or round as their inputs do

LIST = load("default", dtype="bfloat16", device="cpu")  # those of other devices name the same products
LINES = 3  # of operations that a finding names
SEEN = ("eager", "aot_eager")  # backends that call operations one by one


def class_of(operator: Any) -> OpClass | None:
    """Return the class of an operator in the default list, None if it is in none."""
    rule = LIST.lookup(operator, {})
    return None if rule is None else rule.cls


@dataclass
class Work:
    """What ran in a region, and in no inner one: operations by device, products by dtype, what computed by low dtype.

    ``lines``: of what computed low. ``grad``: whether gradients were recorded when it was entered.
    """

    devices: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    low: Counter[str] = field(default_factory=Counter)
    lines: dict[str, None] = field(default_factory=dict)
    grad: bool = False


@dataclass(eq=False)
class AutocastRegions(Watcher):
    """Looks at what ran inside of each region."""

    _work: dict[int, Work] = field(default_factory=lambda: defaultdict(Work))
    _backwards: Counter[tuple[Place, int]] = field(default_factory=Counter)
    _compiled: dict[Place, None] = field(default_factory=dict)

    def heard(self, event: Event) -> None:
        """Take a region, a backward in one, and what is compiled."""
        inside = self.training.open[-1] if self.training.open else -1
        if event.name == "autocast.enter" and event.is_after:
            self._work[inside].grad |= torch.is_grad_enabled()
        elif event.name == "backward" and not event.is_after and inside >= 0 and not in_backward():
            self._backwards[event.place, inside] += self.training.regions[inside].enabled
        elif event.name == "compile" and event.is_after:  # Module.compile hands its arguments on
            given = {"backend": "inductor", **event.arguments, **event.arguments.get("kwargs", {})}
            self._compiled |= {} if given["backend"] in SEEN else {event.place: None}

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation of the forward in its region."""
        if call.phase != "forward" or call.region < 0 or not call.output:
            return
        work = self._work[call.region]
        work.devices.update({t.device.type for t in tensors_in(result)})
        kind = class_of(operator)
        work.products[call.output] += kind is OpClass.ALLOW
        if kind in COMPUTES and call.output in LOW:
            work.low[call.output] += 1
            work.lines[f"{name_of(call.operator)} at {call.place}"] = None

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield what the regions did not do, and what should not be in them."""
        acts = self._acting()
        of_script = [(n, region) for n, region in enumerate(self.training.regions) if region.made.file]
        for number, region in of_script:  # others are torch's own
            if region.asked and not region.enabled:
                yield finding(
                    "AMP102", region.made, f"{_text(region)} was entered {region.entered} times, and torch disabled it "
                    "each time: this device, or this dtype on it, is not there",
                    "torch.autocast(x.device.type, dtype=torch.bfloat16), for the device of the inputs",
                    **_evidence(region),
                )  # fmt: skip
            elif region.outer >= 0 and (fight := self._fight(number, region)):
                yield fight
            elif region.enabled and region.looked_at and number not in acts:
                yield from self._idle(number, region)
            elif not region.asked and region.outer < 0 and region.looked_at:
                yield from self._off(number, region)
        for (place, number), times in (+self._backwards).items():
            region = self.training.regions[number]
            yield finding(
                "AMP103", place, f"backward ran {times} times inside of {_text(region)}, entered at {region.place}",
                "leave the region first: loss.backward() stands outside of the with block", times=times,
                region=str(region.place),
            )  # fmt: skip
        on = [n for n, region in enumerate(self.training.regions) if region.enabled and region.looked_at]
        for place in self._compiled if on else ():
            yield finding(
                "AMP106", place, "operations that are fused in code compiled here are not seen: in "
                f"{sum(n not in acts for n in on)} of {len(on)} autocast regions nothing that was seen ran low",
                "backend='eager' for the audit", regions=len(on),
            )  # fmt: skip

    def _acting(self) -> set[int]:
        """Return the regions in which autocast cast, or something ran low, in an inner region too."""
        low = (c for c in self.training.calls if c.cast == "autocast" or (c.phase == "forward" and c.output in LOW))
        found = {call.region for call in low}
        for number in list(found):
            while number >= 0 and self.training.regions[number].enabled:
                found.add(number)
                number = self.training.regions[number].outer
        return found

    def _idle(self, number: int, region: Region) -> Iterator[Finding]:
        work = self._work[number]
        others = sorted(set(work.devices) - {region.device, "meta"})
        if others and region.device not in work.devices:
            yield finding(
                "AMP102", region.made, f"{_text(region)} was entered {region.entered} times, and all of the "
                f"{work.devices.total()} operations seen in it ran on {', '.join(others)}",
                f"torch.autocast({others[0]!r}, dtype=torch.bfloat16), for the device of the inputs",
                **_evidence(region), devices=dict(work.devices),
            )  # fmt: skip
        elif not self._compiled:
            helps = not work.products.total() and any(one.grad and _low_products(one) for one in self._work.values())
            yield finding(
                "AMP101", region.place, f"{_text(region)} was entered {region.entered} times; of the "
                f"{work.devices.total()} operations seen in it none ran in low precision, and "
                f"{work.products.total()} are products or convolutions",
                "enter autocast around the call of the model, and compute the loss in it",
                level="note" if helps else "", **_evidence(region), operations=work.devices.total(),
            )  # fmt: skip

    def _off(self, number: int, region: Region) -> Iterator[Finding]:
        """Yield a region that the script disables, if it trains in it, and in full precision alone."""
        works = self._work.items()
        trained = any(_low_products(work) for _, work in works if work.grad)
        evaluated = any(_low_products(work) for _, work in works if not work.grad)
        if not self._work[number].grad or not self._work[number].products.total() or trained:
            return
        why = "a GradScaler scales the loss" if self.training.scaled else "autocast is on where no gradient is recorded"
        meant = self.training.scaled or evaluated
        yield finding(
            "AMP101", region.place, f"{_text(region)} is disabled by its enabled=, and the training's "
            f"{self._work[number].products.total()} products and convolutions seen in it ran in full precision"
            + (f", while {why}" if meant else ""),
            "enabled=True for the training, or no region at all", level="" if meant else "note", **_evidence(region),
        )  # fmt: skip

    def _fight(self, number: int, region: Region) -> Finding | None:
        outwards = self.training.outwards(region.outer)
        outer = next((one for one in outwards if one.device == region.device and one.made.file), None)
        if outer is None:
            return None
        work, around, text, fix = self._work[number], f"{_text(outer)} of {outer.place}", "", ""
        # Where the user casts to low precision in a region, what then runs low is meant to.
        lowers = any(c.region == number and c.cast == "user" and c.output in LOW for c in self.training.calls)
        if region.enabled and outer.enabled and region.dtype != outer.dtype:
            text, fix = (
                f"{_text(region)} is entered inside of {around}: values cross from one dtype to the other",
                f"one dtype: torch.autocast({region.device!r}, dtype=torch.{outer.dtype}), or no inner region",
            )
        elif region.enabled and not outer.asked:
            text, fix = (
                f"{_text(region)} is entered inside of {around}, which disables autocast: here it is on again",
                "pass the same enabled= to both, or leave out one of the regions",
            )
        elif not region.asked and outer.enabled and work.low.total() and not lowers:
            dtype = work.low.most_common(1)[0][0]
            text, fix = (
                f"autocast is disabled here, inside of {around}, and {work.low.total()} operations computed in {dtype} "
                f"all the same, as their inputs are: {', '.join(list(work.lines)[:LINES])}"
                + (", ..." if len(work.lines) > LINES else ""),
                "x.float() for each input of the disabled region",
            )
        elif not region.asked and outer.enabled and work.products.total() and not self._low_in(region.outer):
            text, fix = (
                f"autocast is disabled here, for all products of the region around it, {around}",
                "disable autocast around the part that needs full precision alone",
            )
        evidence = {**_evidence(region), "outer": str(outer.place), "low": work.low.total()}
        return finding("AMP104", region.place, text, fix, **evidence) if text else None

    def _low_in(self, region: int) -> bool:
        """Say whether a product ran low in a region, or in one inside of it."""
        inner = (n for n, one in enumerate(self.training.regions) if one.outer == region)
        return _low_products(self._work[region]) or any(map(self._low_in, inner))


def _low_products(work: Work) -> bool:
    return any(work.products[dtype] for dtype in LOW)


def _text(region: Region) -> str:
    return f"autocast({region.device!r}, {region.dtype})"


def _evidence(region: Region) -> dict[str, Any]:
    return {"device": region.device, "dtype": region.dtype, "entered": region.entered}
