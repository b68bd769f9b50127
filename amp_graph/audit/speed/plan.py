"""What amp_graph would do with the models of a training, in a few lines: casts, bytes, time, error, what to type.

Before: a training under autocast, with 41 casts a call. After: "casts in a forward: 13, 0.4 MB; as it ran: 41, 1.9 MB".

The plan is the real one, of the model on fake tensors of the sizes that were seen. It is made when it is first read.
"""

from __future__ import annotations

import importlib
from collections import Counter, UserList
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from amp_graph.audit.records import LOW, Training
from amp_graph.audit.speed.model_sketch import Sketch, refuse, sketch_of
from amp_graph.audit.speed.predicted_time import dtype_of, is_product
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt, first_line
from amp_graph.passes.torch_compat.dispatch import has_modes
from amp_graph.policy import Policy

if TYPE_CHECKING:
    from amp_graph.audit.speed.planned_call import Planned

BY_HAND = "to see it: amp-graph plan model.py:build, of a function that builds the model"
MEASURE = (
    "amp-graph cost model.py:build measures it: predictions leave out some fused kernels, as of attention's backward"
)


def draw_sketches(training: Training) -> None:
    """Draw the models that were called with gradients since this was last done, while they are there.

    A compiled or a converted model records its gradients outside of its call.
    """
    if has_modes():
        return
    for model in dict.fromkeys([*training.models, *training.model_calls]):
        if id(model) not in training.sketches and any(p.requires_grad for p in model.parameters()):
            with Attempt() as tried:
                if (call := training.model_calls.get(model)) is None:
                    refuse(model)
                else:
                    training.sketches[id(model)] = sketch_of(model, call)
            if tried.error is not None:
                training.sketches[id(model)] = _why(tried)


class PlanLines(UserList[str]):
    """What amp_graph would do with the models that were trained, in lines: they are made when they are first read.

    To capture a model takes seconds.
    """

    def __init__(self, training: Training) -> None:
        """Begin."""
        self._training = training

    @cached_property
    def data(self) -> list[str]:  # type: ignore[override]
        """The lines."""
        return list(_lines(self._training))


def _lines(training: Training) -> Iterator[str]:
    products: Counter[str] = Counter()
    for call, totals in training.calls.items():
        products[dtype_of(call)] += totals.calls if is_product(call) else 0
    dtype = "fp16" if products["float16"] > products["bfloat16"] else "bf16"
    if products.total() and not any(products[name] for name in ("float32", *LOW)):
        yield f"amp_graph leaves {', '.join(products)} as it is: there is nothing to plan"
        return
    sketches = [one for one in training.sketches.values() if isinstance(one, Sketch)]
    reasons = [one for one in training.sketches.values() if isinstance(one, str)]
    total = _total(sketches, dtype, reasons)
    if total is None and not reasons:
        seen = "no call of a model recorded gradients"
        reasons.append(seen if training.calls else "the training ended before a step was looked at")
    for reason in dict.fromkeys(reasons):
        yield f"not planned: {reason}"
    if total is not None:
        yield from _of_plans(total, sketches, training, dtype)
    else:
        yield f"casts as it ran: {_casts_as_it_ran(training, max(1, len(training.looked_at)))} a step"
        yield BY_HAND


def _total(sketches: Sequence[Sketch], dtype: str, reasons: list[str]) -> Planned | None:
    """Return the plans of all sketches in ``dtype`` as one, None if there is none; ``reasons`` gets why one failed."""
    total = None
    for sketch in sketches:
        with Attempt() as tried:
            plan: Planned = _planned_call().planned(sketch, Policy.parse(dtype))
            total = plan if total is None else total + plan
        if tried.error is not None:
            reasons.append(f"{sketch.name}: {_why(tried)}")
    return total


def _of_plans(total: Planned, sketches: Sequence[Sketch], training: Training, dtype: str) -> Iterator[str]:
    calls = max(1, sum(one.call.calls for one in sketches) // len(sketches))
    names = ", ".join(dict.fromkeys(one.name for one in sketches))
    yield f"amp_graph.convert would run {names} in {dtype}, planned for {total.machine}:"
    yield f"casts in a forward: {_sized(total.casts, total.bytes)}; as it ran: {_casts_as_it_ran(training, calls)}"
    seconds = max(total.seconds, 1e-30)
    of_full, of_autocast = total.full / seconds, total.autocast / seconds
    yield (
        f"predicted speed of the models' forward and backward: {of_full:.2f} times float32's, {of_autocast:.2f} times "
        "torch.autocast's"
    )
    yield "predicted error: about torch.autocast's; amp-graph plan measures it"
    is_on = any(region.enabled for region in training.regions)
    if total.is_worth_it or (is_on and of_full > 1):  # a margin is asked only of what runs in float32
        yield f'to have it: model = amp_graph.convert(model, "{dtype}")'
    elif dtype == "fp16" and (other := _total(sketches, "bf16", [])) is not None and other.is_worth_it:
        speed = other.full / max(other.seconds, 1e-30)
        yield f'in bf16 it is predicted to be {speed:.2f} times float32\'s: model = amp_graph.convert(model, "bf16")'
    else:
        off = ", and turn torch.autocast off" if is_on else ""
        yield f"keep float32 for these sizes on {total.machine}{off}"
    yield MEASURE


def _casts_as_it_ran(training: Training, calls: int) -> str:
    cast = [totals for call, totals in training.calls.items() if call.cast]
    return _sized(round(sum(t.calls for t in cast) / calls), sum(t.bytes for t in cast) / calls)


def _why(tried: Attempt) -> str:
    """Return the message of an error of ours, the kind and the message of any other."""
    return first_line(tried.error) if isinstance(tried.error, AmpGraphError) else tried.reason


def _sized(count: int, size: float) -> str:
    return f"{count}, {size / 1e6:.3g} MB"


def _planned_call() -> Any:
    """Return the module that plans; it imports Dynamo, which takes as long as torch."""
    return importlib.import_module("amp_graph.audit.speed.planned_call")
