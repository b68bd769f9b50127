"""Runs forward and backward of a batch under a watch: through the planned graph, or as code where there is none.

Before: ``step(x, y)``, which skipped its update. After: ``Ran(events, bad, ...)``, and a model that is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import keystr, tree_flatten_with_path

from amp_graph.capture.as_written import Region, in_words, region_of
from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.dynamo_backend import lower, with_sums_in_fp32
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.devices import device_of
from amp_graph.errors import CaptureError
from amp_graph.lists.errors import first_line
from amp_graph.model_state import unchanged
from amp_graph.numerics.batches import gradients, refuse_detached
from amp_graph.numerics.overflow.places import CodePlaces, GraphPlaces
from amp_graph.numerics.overflow.watch import Watch, is_bad, is_lost_in_cast
from amp_graph.passes.graph.bodies import AsPython
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, Runner, capture_with_dynamo, dynamo_errors
from amp_graph.passes.torch_compat.dynamo_entries import own_code_object
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA
from amp_graph.policy import Policy
from amp_graph.rewrite import rewrite_in_place
from amp_graph.step.step_arguments import call_model, loss_of, refuse_what_is_no_loss

# What a graph is not captured for; the code then runs as it is, and raises errors of its own.
NOT_CAPTURED = (dynamo_errors.TorchDynamoException, *DEPENDS_ON_DATA)


@dataclass(frozen=True)
class Task:
    """What is run: ``model`` and its loss over ``parts`` of a batch, each as a step would be called with it."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any] | None
    policy: Policy
    parts: tuple[tuple[Any, ...], ...]
    scale: float
    in_step: bool = False


@dataclass
class Ran:
    """One way to run a batch: ``compute``, under ``watch``; ``how``: what runs, in words.

    ``bad``: where values that are not finite arrived, with the numbers of events that they come from.
    """

    compute: Callable[..., Any]
    watch: Watch
    how: str
    skips_low: bool = False  # whether gradients of parameters in low precision are left out
    bad: dict[str, frozenset[int]] = field(default_factory=dict)


def run_planned(task: Task) -> Ran:
    """Run the planned graph of ``task``; its code under ``torch.autocast``, by the policy, if it is not one graph."""
    try:
        return _run(task, _in_graph)
    except NOT_CAPTURED as error:
        why = first_line(error) or type(error).__name__
    found = _run(task, partial(_code, region=region_of(task.model, task.policy)))
    return replace(found, how=f"{found.how}: it is not one graph ({why})")


def run_in_fp32(task: Task) -> Ran:
    """Run the code of ``task`` as it is written, without autocast and without a loss scale."""
    # Gradients of parameters in low precision are cast to it.
    return _run(replace(task, scale=1.0), partial(_code, region=None, skips_low=True))


MASKED = "a softmax, whose rows that see nothing are others than in fp32"


def _run(task: Task, way: Callable[[Task], Ran]) -> Ran:
    with ExitStack() as around:
        around.enter_context(unchanged(task.model, task.parts))
        around.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            around.enter_context(torch.autocast(kind, enabled=False))
        found = way(task)
        for part in task.parts:
            _give(found.watch, task, part)
            for name, origins in _differentiated(task, found, part):
                found.bad.setdefault(name, origins)
            if found.bad:
                break
    lost = [number for number, (facts, _) in enumerate(found.watch.events) if is_lost_in_cast(facts)]
    if lost and not found.bad:
        found.bad[MASKED] = frozenset(lost)
    return found


def _differentiated(task: Task, way: Ran, part: tuple[Any, ...]) -> Iterator[tuple[str, frozenset[int]]]:
    """Run forward and backward; yield where values that are not finite arrive, with their events."""
    watch = way.watch
    result = way.compute(*part)
    refuse_what_is_no_loss(result, "locate")
    with watch:
        scaled = result * (task.scale / len(task.parts))
    if is_bad(result):
        yield "the loss", watch.origins_of(result)
    else:
        refuse_detached("locate", _parameters(task), result, CaptureError)
        if is_bad(scaled):
            yield "the scaled loss", watch.origins_of(scaled)
    named = {n: p for n, p in _parameters(task) if p.requires_grad and not (way.skips_low and p.dtype in HALVES)}
    if not named or not scaled.requires_grad:
        return
    with watch:
        grads = gradients(task.model, scaled, list(named.values()))
    for name, grad in zip(named, grads, strict=True):
        if grad is not None and is_bad(grad):
            yield f"the gradient of {name}", watch.origins_of(grad)


def _parameters(task: Task) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from task.model.named_parameters()
    if isinstance(task.loss_fn, torch.nn.Module):
        yield from ((f"loss_fn.{name}", p) for name, p in task.loss_fn.named_parameters())


def _give(watch: Watch, task: Task, part: tuple[Any, ...]) -> None:
    """Check what the run is given: the batch, parameters, buffers."""
    has_targets = task.loss_fn is not None
    given: dict[str, Any] = {
        f"{'target' if has_targets and getattr(path[0], 'idx', False) else 'input'} batch{keystr(path)}": leaf
        for path, leaf in tree_flatten_with_path(list(part))[0]
    }
    held = {f"parameter {name}": p for name, p in _parameters(task)}
    for name, value in (given | held | {f"buffer {name}": b for name, b in task.model.named_buffers()}).items():
        if isinstance(value, Tensor):
            watch.give(name, value)


# -- two ways to compute ------------------------------------------------------------------------------------


def _in_graph(task: Task) -> Ran:
    """Capture model and loss as one graph, rewrite it, and run it node by node."""
    places = GraphPlaces()
    watch = Watch(places)
    policy = replace(task.policy, keep_outputs=True)

    def take(gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        name_nodes(gm, task.model, task.model.forward)
        device = device_of(gm)
        rewrite_in_place(gm, policy, None if device == "cpu" else device, eager=True, in_step=task.in_step)
        lower(gm, example_inputs, "eager", policy)
        observed = with_sums_in_fp32(places.observed(gm), policy, device)

        def run(*args: Any) -> Any:
            with watch:
                return observed(*args)

        return run

    function: Any = own_code_object(_forward_and_loss(task))  # type: ignore[arg-type]
    compute = capture_with_dynamo(
        function, take, dynamic=False, fullgraph=True, heard=CaptureListener(), collector_waits=True
    )
    return Ran(compute, watch, "the planned graph, node by node")


def _code(task: Task, region: Region | None, skips_low: bool = False) -> Ran:
    """Run the code as calls without graphs run, in a region of autocast or in fp32."""
    places = CodePlaces(task.model)
    watch = Watch(places, places.seen)
    compute = _forward_and_loss(task)

    def amp_graph_compute(*batch: Any) -> Any:
        with watch, AsPython(), torch.autocast(*region) if region else nullcontext():
            result = compute(*batch)
            return result.float() if isinstance(result, Tensor) and result.itemsize < 4 else result

    return Ran(amp_graph_compute, watch, f"the code, {in_words(region)}", skips_low)


def _forward_and_loss(task: Task) -> Callable[..., Any]:
    """Return what computes the loss of a part of a batch."""
    found: Any = conversion_of(task.model)
    loss_fn = task.loss_fn
    try:  # the forward that a converted model was written with
        forward = task.model if found is None else found.as_written()
    except CaptureError:  # hooks of the model itself run around its conversion, and not here
        forward = found.forward

    def amp_graph_forward(*batch: Any) -> Any:
        out = call_model(forward, batch[0]) if loss_fn is not None else call_model(forward, *batch)
        return loss_of(out) if loss_fn is None else loss_fn(out, *batch[1:])

    return amp_graph_forward
