"""What amp_graph would do with the models of a training, in a few lines: casts, bytes, time, error, what to type.

Before: a training under autocast, with 41 casts a call. After: "casts in a forward: 13, 0.4 MB; as it ran: 41, 1.9 MB".

The plan is the real one, of the model on fake tensors of the sizes that were seen. It is made when it is first read.
"""

from __future__ import annotations

import importlib
import traceback
from collections import Counter, UserList
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from amp_graph.audit.records import LOW, Places, Training
from amp_graph.audit.speed.model_sketch import Sketch, refuse, sketch_of
from amp_graph.audit.speed.predicted_time import dtype_of, is_product
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt, first_line
from amp_graph.passes.precision.predict_time import WORTH_IT
from amp_graph.passes.torch_compat.dispatch import has_modes
from amp_graph.policy import Policy

if TYPE_CHECKING:
    from amp_graph.audit.speed.planned_call import Planned

BY_HAND = "to see it: amp-graph plan model.py:build, of a function that builds the model"
MEASURE = (
    "amp-graph cost model.py:build measures it: predictions leave out some fused kernels, as of attention's backward"
)

LEAST_GAIN = 1.1  # over torch.autocast: predicted times of both are as far from measured ones


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
        early = "the training ended before a step was looked at"
        reasons.append("no call of a model recorded gradients" if training.calls else early)
    for reason in dict.fromkeys(reasons):
        yield f"not planned: {reason}"
    if total is not None and not reasons:
        yield from _of_plans(total, sketches, training, dtype)
        return
    yield f"casts as it ran: {_casts_as_it_ran(training, training.looks)} a step"
    if total is not None:
        yield "nothing is compared: what is predicted of a part says nothing of the whole"
    if training.sketches:
        yield BY_HAND


def _total(sketches: Sequence[Sketch], dtype: str, reasons: list[str]) -> Planned | None:
    """Return the plans of all sketches in ``dtype`` as one, None if there is none; ``reasons`` gets why one failed."""
    total = None
    for sketch in sketches:
        with Attempt() as tried:
            # It imports Dynamo, which takes as long as torch.
            plan_call = importlib.import_module("amp_graph.audit.speed.planned_call")
            plan: Planned = plan_call.planned(sketch, Policy.parse(dtype))
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
    yield _advice(total, sketches, training, dtype)
    yield MEASURE


def _advice(total: Planned, sketches: Sequence[Sketch], training: Training, dtype: str) -> str:
    """Return what to type, if it is predicted to be faster than what runs by more than predictions are wrong."""
    is_on = any(region.enabled for region in training.regions)
    is_low = is_on or any(is_product(call) and dtype_of(call) in LOW for call in training.calls)
    runs, least = (total.autocast, LEAST_GAIN) if is_low else (total.full, WORTH_IT)
    if _gains(total, runs, least):
        return f'to have it: model = amp_graph.convert(model, "{dtype}")'
    other = _total(sketches, "bf16", []) if dtype == "fp16" else None
    if other is not None and _gains(other, runs, least):
        speed = other.full / max(other.seconds, 1e-30)
        return f'in bf16 it is predicted to be {speed:.2f} times float32\'s: model = amp_graph.convert(model, "bf16")'
    if not is_low or (is_on and runs > least * total.full):
        return f"keep float32 for these sizes on {total.machine}" + (", and turn torch.autocast off" if is_on else "")
    return "nothing is predicted to be gained over what runs"


def _gains(plan: Planned, runs: float, least: float) -> bool:
    return plan.seconds < plan.full and least * plan.seconds < runs


def _casts_as_it_ran(training: Training, calls: int) -> str:
    cast = [totals for call, totals in training.calls.items() if call.cast]
    return _sized(round(sum(t.calls for t in cast) / calls), sum(t.bytes for t in cast) / calls)


def _why(tried: Attempt) -> str:
    """Return the message of an error of ours; the kind and the message of any other, and the user's line."""
    if isinstance(tried.error, AmpGraphError) or tried.error is None:
        return first_line(tried.error)
    places = [Places().of(frame) for frame, _ in traceback.walk_tb(tried.error.__traceback__)]
    return tried.reason if places[-1] == places[0] else f"{places[-1]}: {tried.reason}"  # a line of the model's code


def _sized(count: int, size: float) -> str:
    return f"{count}, {size / 1e6:.3g} MB"
