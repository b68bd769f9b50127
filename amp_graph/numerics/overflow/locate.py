"""``locate``: names the operation that made the first infinity or NaN of a batch, in forward or backward.

Before: a loss that is NaN, or a step that was skipped. After: the module, the user's line, the operands' ranges, what
fp32 would have given, and the policy that helps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amp_graph.capture.conversion import WRAPPERS, conversion_of
from amp_graph.convert import refuse_what_is_no_model, warn_of_unmatched
from amp_graph.errors import CaptureError, PolicyError, ScaleError
from amp_graph.numerics.batches import parts_of, refuse_what_cannot_run
from amp_graph.numerics.overflow.result import Located, dtype_text
from amp_graph.numerics.overflow.run import Ran, Task, run_in_fp32, run_planned
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.policy import Policy
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.step.step_arguments import refuse_loss_fn, split_batch
from amp_graph.step.train_step import TrainStep

LOW = tuple(map(dtype_text, HALVES))
LEAST_SCALE = 1.0  # below it, smaller gradients vanish than fp16 can hold without a scale: a lower one is no advice
ROUNDS = 6  # of a fix that is tried: an overflow that is kept in fp32 may overflow where its value is read


def locate(
    model: torch.nn.Module | TrainStep,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    policy: Policy | str | None = None,
    scale: Any = None,
    try_fix: bool = True,
) -> Located:
    """Name the operation that makes the first value that is not finite, in forward or backward of ``batch``.

    model: converted or not, or a ``TrainStep``, whose loss, policy and scale are then used. It may be in training or
    in eval mode; parameters, ``.grad``, buffers and the state of random number generators are as before afterwards.
    batch: what a ``TrainStep`` is called with: ``(inputs, *targets)``, or for ``loss_fn=None`` the model's arguments; a
    dict, or one tensor, is the model's inputs. Dropout draws what a step from here would draw.
    policy: as for ``convert``; by default that of the converted model.
    scale: the loss scale: a number, a tensor of one element, a ``GradScaler`` or a ``LossScale``. By default that of
    the ``TrainStep``, else 1.
    try_fix: run the batch under the suggested policy, and keep further operations in fp32 while others overflow.

    The batch runs through the planned graph, node by node, each result checked; as code under ``torch.autocast`` where
    model and loss are not one graph. If something is found, the code runs once more in fp32. Takes several times as
    long as a step, copies to the host, and captures the model anew.

    Raises CaptureError (no model, an empty batch, no loss), PolicyError, ScaleError; the model's own errors propagate.
    """
    task = task_of(model, batch, loss_fn, policy, scale)
    if policy is not None:  # else the one with which the model was converted
        warn_of_unmatched(task.model, task.policy)
    return located(task, try_fix)


def located(task: Task, try_fix: bool = False) -> Located:
    """Return what is found in ``task``; ``try_fix``: see ``locate``."""
    ran = run_planned(task)
    own: dict[str, Any] = {"scale": task.scale, "policy": str(task.policy), "how": ran.how, "reached": tuple(ran.bad)}
    if not ran.bad:
        return Located(**own)
    event = first_of(ran)
    if event is None:
        fix = "policy 'bf16', or amp_graph.locate with skip=backend in the policy"
        return Located(kind="unknown", fix=(fix,), **own)
    found = replace(event, **own)
    if found.given:
        fix = f"look at {found.given}: it had {found.result} before the model was called"
        return replace(found, kind="given", fix=(fix,))
    in_fp32 = run_in_fp32(task)
    if in_fp32.bad:
        return _told_in_fp32(found, first_of(in_fp32))
    found = replace(found, kind="overflow", lower_scale=lower_scale(found))
    return replace(found, fix=tuple(fixes(found, task, try_fix)))


def first_of(ran: Ran) -> Located | None:
    """Return the first event behind what arrived; one that fills in infinities on purpose only if there is no other."""
    events, numbers = ran.watch.events, frozenset[int]().union(*ran.bad.values())
    return events[min(numbers, key=lambda number: (events[number][1], number))][0] if numbers else None


def _told_in_fp32(found: Located, event: Located | None) -> Located:
    """Return what is told where a run in fp32 is not finite either, first by ``event``."""
    facts = Located() if event is None else event
    module = f"module {facts.module}" if facts.module else ""
    first = facts.given or facts.line or module or facts.operator or "the loss"
    if facts.dtype in LOW and facts.is_finite_in_fp32:  # the code casts to low precision itself
        fix = f"the code itself casts to {found.dtype}, under any policy: change that before {first}"
        return replace(found, kind="overflow", fix=(fix,))
    what = "look for the division, logarithm or overflow there: no precision and no scale will help"
    return replace(found, kind="not finite in fp32", fp32_line=first, fix=(what,))


def fixes(found: Located, task: Task, try_fix: bool) -> list[str]:
    """Return what helps against an overflow, best first."""
    told = []
    if found.lower_scale is not None:
        told.append(f"a loss scale of at most {found.lower_scale:g}: only the scaled gradient overflows")
    kept = keeping(task.policy, found)
    works = tried(task, kept) if try_fix and kept is not None else kept
    if works is not None:
        so = ": with it, loss and gradients are finite" if try_fix else ""
        told.append(f"policy {str(works)!r}, which keeps it in fp32{so}")
    if found.dtype == "f16" and not (found.in_fp32 or 0.0) > torch.finfo(torch.bfloat16).max:
        told.append(f"policy {str(replace(task.policy, dtype='bf16'))!r}: bf16 ends where fp32 does")
    return told


def tried(task: Task, policy: Policy) -> Policy | None:
    """Return ``policy``, with what else must be kept in fp32, if loss and gradients are finite under it; else None."""
    for _ in range(ROUNDS):
        ran = run_planned(replace(task, policy=policy))
        event = first_of(ran) if ran.bad else None
        if not ran.bad:
            return policy
        more = None if event is None or event.given else keeping(policy, event)
        if more is None:
            return None
        policy = more
    return None


def lower_scale(found: Located) -> float | None:
    """Return the largest power of two as scale at which a gradient fits; None if only one below 1 does."""
    limit, size = found.limit or math.inf, found.in_fp32 or 0.0
    if found.direction != "backward" or not limit < size < math.inf:
        return None
    lower = 2.0 ** math.floor(math.log2(found.scale * limit / size))
    return lower if lower >= LEAST_SCALE else None


def keeping(policy: Policy, found: Located) -> Policy | None:
    """Return ``policy`` with the module of ``found`` kept in fp32, else its operation; None where that is no change."""
    module, operation = found.keep
    if module:
        # An expression without backslashes, which quotes around a policy would double.
        pattern = re.sub(r"[^\w-]", lambda m: "." if m[0] in "^\\" else f"[{m[0]}]", module)
        made = replace(policy, keep_fp32="|".join(dict.fromkeys(filter(None, (*policy.keep_fp32.split("|"), pattern)))))
    else:
        name = operation.removeprefix(".").removeprefix("aten.").partition(".")[0]
        try:
            made = replace(policy, deny=tuple(dict.fromkeys((*policy.deny, name)))) if name else policy
        except PolicyError:  # a function that no list can name
            return None
    return None if made == policy else made


# -- arguments ------------------------------------------------------------------------------------------------


def task_of(model: Any, batch: Any, loss_fn: Any, policy: Policy | str | None, scale: Any) -> Task:
    """Return the task of the arguments of ``locate``; refuse what is none."""
    if isinstance(model, TrainStep):
        return _of_step(model, _parts(batch), loss_fn, policy, scale)
    refuse_what_is_no_model("locate", model)
    refuse_loss_fn("locate", loss_fn, CaptureError)
    model = model.module if isinstance(model, WRAPPERS) else model
    refuse_what_cannot_run("locate", model)
    known = conversion_of(model)
    wanted = known.policy if known is not None and policy is None else Policy.parse(policy)
    return Task(model, loss_fn, wanted, (_parts(batch),), scale_of(1.0 if scale is None else scale))


def _of_step(step: TrainStep, batch: tuple[Any, ...], loss_fn: Any, policy: Any, scale: Any) -> Task:
    if loss_fn is not None or (policy is not None and Policy.parse(policy) != step.policy):
        raise CaptureError(
            "locate: a TrainStep has its loss_fn and policy already\n"
            "  legal: amp_graph.locate(step, batch, scale=...)\n"
            "  fix:   amp_graph.locate(step.model, batch, loss_fn, policy=...)"
        )
    if scale is None:
        scale = 1.0 if step.loss_scale is None else step.loss_scale
    parts = split_batch(batch, step.micro_batches) if step.micro_batches > 1 else [batch]
    return Task(step.model, step.loss_fn, step.policy, tuple(map(tuple, parts)), scale_of(scale), in_step=True)


def _parts(batch: Any) -> tuple[Any, ...]:
    return parts_of("locate: the batch", batch, "amp_graph.locate(model, (x, y), loss_fn)", CaptureError)


def scale_of(given: Any) -> float:
    """Return a loss scale as a number; ScaleError for what is none."""
    if isinstance(given, torch.amp.GradScaler):
        given = given.get_scale() if given.is_enabled() else 1.0
    if isinstance(given, LossScale):
        given = given.values()[0]
    if isinstance(given, Tensor) and given.numel() == 1:
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 < float(given) < math.inf:
        raise ScaleError(
            f"locate: scale={given!r}\n  legal: a number above 0, a tensor of one, a GradScaler, a LossScale\n"
            "  fix:   scale=scaler"
        )
    return float(given)
