"""Rewrites an FX graph to mixed precision: graph in, rewritten graph out.

Before: a ``GraphModule`` from torch.export, symbolic_trace or Dynamo. After: a copy with casts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.devices import device_of
from amp_graph.errors import CaptureError, PassError, VerifyError, warn
from amp_graph.example_values import with_example_values
from amp_graph.passes.autocast_regions.autocast_fallback import run_as_autocast
from amp_graph.passes.base import Pass
from amp_graph.passes.casts.portable_ops import drop_metadata_asserts
from amp_graph.passes.graph.activation_checkpoints import inline_checkpoints
from amp_graph.passes.graph.bodies import bodies_of
from amp_graph.passes.graph.fake_values import adopt_values, tensors, value
from amp_graph.passes.graph.grad_regions import mark_regions
from amp_graph.passes.graph.graph_snapshot import copied_graph
from amp_graph.passes.graph.graph_text import CapturedNode, captured_nodes, graph_text
from amp_graph.passes.graph.meta_keys import (
    CAPTURED,
    CLASSIFIED,
    IDENTITY,
    LEFT_ALONE,
    MARK,
    UNCALIBRATED,
    UNKEPT,
    UNPLANNED,
)
from amp_graph.passes.manager import REPORT_IT, Timed, is_strict, run_passes
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.predict_time import WORTH_IT
from amp_graph.passes.precision.sensitivity import Measured
from amp_graph.passes.torch_compat.modules import is_exported
from amp_graph.passes.weights.frozen_weights import FrozenWeights
from amp_graph.policy import Policy
from amp_graph.policy_words import word_of


@dataclass
class Rewritten:
    """One rewritten graph, with its changes and their reasons.

    ``before``: the text of the graph as captured; ``captured``: its nodes.
    """

    gm: GraphModule
    policy: Policy
    dtype: torch.dtype
    before: str
    passes: tuple[Timed, ...]
    bodies: dict[str, Rewritten] = field(default_factory=dict)
    captured: tuple[CapturedNode, ...] = ()


def unkept(found: Iterable[Rewritten]) -> dict[str, list[str]]:
    """Return the keys of a policy's ``keep_ops`` that no planned graph has, with the operations of their modules."""
    every = list(found)
    for one in every:
        every += one.bodies.values()
    metas = [one.gm.meta[UNKEPT] for one in every if UNKEPT in one.gm.meta]
    names = [name for name in (metas[0] if metas else ()) if all(name in meta for meta in metas)]
    return {name: list(dict.fromkeys(key for meta in metas for key in meta[name])) for name in names}


def rewrite(
    graph_module: GraphModule,
    policy: Policy | str | None = None,
    example_inputs: Sequence[Any] | None = None,
    *,
    portable: bool | None = None,
) -> GraphModule:
    """Return a copy of ``graph_module`` rewritten under ``policy``; parameters are shared by identity.

    Takes any FX graph: torch.export's (``exported.module()``), Dynamo's, AOTAutograd's, or
    ``torch.fx.symbolic_trace``'s, which has no recorded values and needs ``example_inputs``. Rewriting is
    idempotent.

    policy: as for ``convert``. example_inputs: the graph's inputs in order, needed where it has no recorded values.
    portable: use ATen operators and plain casts only, with operands of one floating-point dtype, so that other
    programs can load the graph. None: where ``torch.export`` made the graph and all of it can be written so.

    A pass that fails is skipped for the graph. A graph that cannot be planned is wrapped in an autocast region. Both
    warn with an AmpGraphWarning.

    Raises CaptureError (not a graph, no values to plan on, or inputs on which it does not run), PolicyError, ListError;
    if ``portable``, PassError and VerifyError for a graph that cannot be planned or written so.
    """
    if not isinstance(graph_module, GraphModule):
        raise CaptureError(
            f"rewrite: {type(graph_module).__name__} is not a torch.fx.GraphModule\n"
            "  legal: a GraphModule from torch.export, torch.fx.symbolic_trace or a Dynamo backend\n"
            "  fix:   amp_graph.convert(model) for a model, or rewrite(torch.export.export(model, args).module())"
        )
    policy = Policy.parse(policy)
    copied = copy_graph(graph_module)
    if example_inputs is not None:
        copied = with_example_values(copied, example_inputs)
    _refuse_without_values(copied)
    if portable is None and is_exported(graph_module):
        attempt = copy_graph(copied)
        try:
            rewrite_in_place(attempt, policy, portable=True)
        except (PassError, VerifyError):  # it is rewritten with operators of amp_graph; portable=True raises this
            portable = False
        else:
            return attempt
    made = rewrite_in_place(copied, policy, portable=bool(portable))
    if LEFT_ALONE in copied.meta:
        warn_of_full_precision("a graph", copied, made.dtype)
    return copied


def _refuse_without_values(gm: GraphModule) -> None:
    """Raise CaptureError for a graph without recorded values; Dynamo's graphs always have them."""
    if has_values(gm):
        return
    if any(n.op in ("call_function", "call_method", "call_module") for n in gm.graph.nodes):
        raise CaptureError(
            "rewrite: the graph has no recorded values (node.meta['val']), so nothing can be planned\n"
            "  fix:   amp_graph.rewrite(graph_module, policy, example_inputs=(x,))"
        )


def has_values(gm: GraphModule) -> bool:
    """Say whether ``gm`` has values recorded that can be planned on, and take them over from its capture."""
    adopt_values(gm)
    return any(tensors(value(n)) for n in gm.graph.nodes)


def rewrite_in_place(
    gm: GraphModule,
    policy: Policy,
    device: str | None = None,
    last: Sequence[Pass] = (),
    *,
    eager: bool = False,
    inductor: Mapping[str, Any] | None = None,
    in_step: bool = False,
    portable: bool = False,
    measured: tuple[Measured, ...] = (),
    frozen: FrozenWeights | None = None,
    strict: bool | None = None,
) -> Rewritten:
    """Rewrite ``gm`` in place with the passes of ``policy``, then ``last``; return the changes.

    A pass that fails is skipped for the graph, with a warning; a graph that cannot be planned runs under
    ``torch.autocast``. ``strict``: both are errors; None reads the environment variable AMP_GRAPH_STRICT.

    ``eager``: the graph will run eagerly, not through a compiler; ``inductor``: through Inductor, with these options
    of the user; ``in_step``: as part of a whole-step graph; ``portable``: other programs will load it.
    ``measured``: measured rounding sensitivities of such graphs, for an error budget. ``frozen``: what a frozen model
    keeps in place of its weights.

    Raises PassError and VerifyError (if strict or portable), ListError and PolicyError.
    """
    if portable:
        drop_metadata_asserts(gm)
    read_values(gm)
    device = device or device_of(gm)
    dtype = policy.torch_dtype(device)
    captured = captured_nodes(gm)
    before = graph_text(gm, [node.text for node in captured])
    bodies: dict[str, Rewritten] = {}
    done: tuple[Timed, ...] = ()
    if policy.level != "O0":
        bodies = _rewrite_bodies(gm, policy, device, strict, portable)
        how: dict[str, Any] = {"eager": eager, "inductor": inductor, "in_step": in_step, "measured": measured}
        how |= {"portable": portable, "frozen": frozen}
        given = policy.pipeline_options(device, **how)
        passes = [*pipeline(Phase.CAPTURED, given), *last]
        done = _run(gm, passes, policy, device, strict, portable)
        if told := gm.meta.get(UNCALIBRATED):  # passes run with warnings off
            warn(told)
    return Rewritten(gm, policy, dtype, before, done, bodies, captured)


def _run(
    gm: GraphModule, passes: list[Pass], policy: Policy, device: str, strict: bool | None, portable: bool
) -> tuple[Timed, ...]:
    """Run ``passes``; put a graph that they cannot plan under autocast."""
    try:
        return run_passes(gm, passes, strict=strict)
    except (PassError, VerifyError) as error:
        if portable or (is_strict() if strict is None else strict):
            raise
        if policy.runs_under_autocast(device):
            run_as_autocast(gm, policy.torch_dtype(device), device, str(error), keep_outputs=policy.keep_outputs)
        else:
            gm.meta[UNPLANNED] = f"runs as captured, without a plan: {error}"
        warn(f"amp_graph: a graph {gm.meta[UNPLANNED]}\n{REPORT_IT}")
        return ()


def read_values(gm: GraphModule) -> None:
    """Take over what a capture recorded on ``gm``, and put the bodies of activation checkpoints in their places."""
    adopt_values(gm)
    inline_checkpoints(gm)
    adopt_values(gm)
    mark_regions(gm)


def ready_to_plan(gm: GraphModule, policy: Policy, device: str | None = None) -> Problem:
    """Run the passes before planning on a captured graph, in place, and return its planning problem."""
    read_values(gm)
    passes = pipeline(Phase.CAPTURED, policy.pipeline_options(device or device_of(gm)))
    at = next(i for i, one in enumerate(passes) if isinstance(one, PlanPrecision))
    run_passes(gm, passes[:at])
    plan = passes[at]
    assert isinstance(plan, PlanPrecision), "found as one"
    return plan.problem(gm)


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy a graph and the graphs inside it; tensors are shared."""
    # Plan marks refer to the original's nodes: a copy is planned again.
    copied = GraphModule(gm, copied_graph(gm, without=(MARK, IDENTITY, CAPTURED, CLASSIFIED)))
    copied.meta = dict(gm.meta)
    for name, part in gm.named_children():
        if isinstance(part, GraphModule) and hasattr(copied, name):
            setattr(copied, name, copy_graph(part))
    return copied


def _rewrite_bodies(
    gm: GraphModule, policy: Policy, device: str, strict: bool | None, portable: bool
) -> dict[str, Rewritten]:
    """Rewrite the graphs inside higher-order operators; their inputs and outputs keep the captured dtypes."""
    inside = replace(policy, keep_outputs=True)
    return {
        body.name: rewrite_in_place(body.graph, inside, device, strict=strict, portable=portable)
        for body in bodies_of(gm)
        if has_values(body.graph)
    }


def warn_of_full_precision(what: str, gm: GraphModule, dtype: torch.dtype) -> None:
    """Warn that ``gm``, a graph of ``what``, stays in fp32 because ``dtype`` is not profitable."""
    low, found = word_of(dtype), gm.meta[LEFT_ALONE]
    warn(
        f"amp_graph: {what} runs in fp32, as {low} is not profitable for this call: it is predicted "
        f"to have {found.speed:.2f} times fp32's speed on {found.machine}, and the least is {WORTH_IT:.2f}\n"
        f"  fix:   policy '{low}' lowers it all the same",
    )
