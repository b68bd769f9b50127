"""Builds whole steps from a captured forward with its loss: rewrites it, then traces it with backward and update.

Before: the GraphModule that Dynamo captured of ``loss_fn(model(x), y)``. After: a ``StepGraph`` that updates, and one
that only accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from amp_graph.capture.dynamo_backend import Compile, compiler_of, lower, with_sums_in_fp32
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.compiler_options import Options
from amp_graph.devices import device_of
from amp_graph.errors import CaptureError
from amp_graph.optim.check_optimizer import refuse_own_state
from amp_graph.optim.master_weight_updates import step_with_gradients
from amp_graph.optim.optimizer_guards import WatchedOptimizer
from amp_graph.optim.torch_fused_update import group_updates
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline import pipeline
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.torch_compat.dynamo_capture import one_capture_at_a_time
from amp_graph.passes.torch_compat.dynamo_entries import weakly
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits
from amp_graph.policy import Policy
from amp_graph.rewrite import rewrite_in_place
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.step.cuda_graph import Replayed
from amp_graph.step.reduce_gradients import Ranks
from amp_graph.step.step_arguments import refuse_gradients_beyond, refuse_several_devices
from amp_graph.step.step_graph import StepGraph, take_loss_mark, trace_step
from amp_graph.step.step_parts import NoGradient, StepParts, refuse_sparse
from amp_graph.step.step_state import Copy, StepState
from amp_graph.step.traced_step import CapturedStep, names_of

# Numbers of trained inputs, in the optimizer's order, and those with gradients of other micro-batches only.
Who = tuple[list[int], dict[int, Tensor]]


@dataclass(eq=False)
class StepBuilder:
    """Builds the steps of a ``TrainStep``; most fields are its arguments."""

    model: torch.nn.Module
    optimizer: Optimizer
    policy: Policy
    compile: Compile
    options: Options
    loss_scale: LossScale | None
    clip_norm: float | None
    clip_value: float | None
    micro_batches: int
    ranks: Ranks | None
    cuda_graph: bool
    state: StepState
    watched: WatchedOptimizer

    def take(self, gm: GraphModule) -> CapturedStep:
        """Rewrite a captured forward with its loss under the policy."""
        name_nodes(gm, self.model, self.model.forward)
        device = device_of(gm)
        policy = replace(self.policy, keep_outputs=True)
        keeps = device == "cpu" and self.compile in ("eager", "inductor") and policy.level != "O0"
        last = pipeline(Phase.COMPILED, policy.pipeline_options("cpu", user=self)) if keeps else []
        own, eager = None if device == "cpu" else device, self.compile == "eager"
        inductor = self.options if self.compile == "inductor" else None
        rewritten = rewrite_in_place(gm, policy, own, last, eager=eager, inductor=inductor, in_step=True)
        if not eager:
            run_passes(gm, pipeline(Phase.HANDOVER, policy.pipeline_options(device, in_step=True)))
        return CapturedStep(rewritten, take_loss_mark(gm), names_of(gm))

    def take_plain(self, gm: GraphModule, example_inputs: Sequence[Any]) -> CapturedStep:
        """Rewrite a captured forward with its loss to run untraced: with symbolic sizes, followed by autograd."""
        name_nodes(gm, self.model, self.model.forward)
        policy = replace(self.policy, keep_outputs=True)
        rewritten = rewrite_in_place(gm, policy, None if device_of(gm) == "cpu" else device_of(gm))
        loss, names = take_loss_mark(gm), names_of(gm)
        forward = lower(gm, example_inputs, "eager", policy)
        return CapturedStep(rewritten, loss, names, traced=False, forward=forward)

    def build(self, captured: CapturedStep, args: Sequence[Any], updates: bool) -> StepGraph:
        """Trace the whole step for these inputs: with the update, or only up to the gradient sums."""
        stateful = {id(p) for p in self.optimizer.state}
        try:
            return self._traced(captured, args, updates)
        except NoGradient as found:  # torch skips parameters whose gradient is None, including decay and momentum
            unused = {id(args[i]): args[i] for i in found.inputs}
            captured.without |= {i for i, a in enumerate(args) if id(a) in unused}
            for p in unused.values():
                if id(p) not in self.state.pending:  # else other micro-batches have contributed
                    self.state.sums.pop(id(p), None)
                if id(p) not in stateful:
                    self.optimizer.state.pop(p, None)
        return self._traced(captured, args, updates)

    def _traced(self, captured: CapturedStep, args: Sequence[Any], updates: bool) -> StepGraph:
        gm = captured.rewritten.gm
        trained, absent = self.trained(args, captured.without, self.state.pending if updates else {})
        parts, how, copies = self._parts(captured, args, trained, absent, updates)
        in_step = self.compile == "eager" and self.policy.level != "O0"
        with one_capture_at_a_time(), collector_waits(self.compile == "eager"):
            passes = pipeline(Phase.STEP, self.policy.pipeline_options(device_of(gm))) if in_step else []
            step = trace_step(parts, self._lower, passes)
        if self.cuda_graph:
            step.run = Replayed(step.run, self._batch_in(args), step.outputs)
        step.update, step.copies = how if updates else "", copies
        step.after = self.outside() if updates and trained else None
        captured.bound.trained = frozenset(id(args[i]) for i in trained if i not in absent)
        return step

    def update_of(
        self, weights: Mapping[str, Tensor], grads: Sequence[Tensor], loss: Tensor, who: Who, last: bool
    ) -> StepGraph:
        """Trace the rest of a step behind ``grads``, which autograd computed of the inputs ``weights``, by name.

        who: the numbers of what is updated, and what has only gradients of other micro-batches, as of ``trained``.
        """
        plain = replace(self, compile="eager", options={}, cuda_graph=False)
        alone = CapturedStep(None, 0, [*weights], traced=False, forward=lambda *args: args)
        parts, how, _ = plain._parts(alone, list(weights.values()), *who, last)
        names = [*weights, *(f"gradient of {name}" for name in weights), "loss"]
        given = replace(parts, args=[*weights.values(), *grads, loss], names=names, gradients_given=True)
        with one_capture_at_a_time():
            step = trace_step(given, plain._lower)
        step.update, step.after = how if last else "", self.outside() if last else None
        return step

    def outside(self) -> Callable[..., None] | None:
        """Return a function that calls an optimizer outside of the graph; None if the update is inside."""
        return weakly(self._step_outside) if self.watched.why_outside else None

    def trained(self, args: Sequence[Any], without: Collection[int], pending: Mapping[int, Tensor]) -> Who:
        """Return the inputs that the optimizer trains, in its order, in which norms are summed; and other parameters.

        The latter are ``pending`` parameters that are not trained inputs, by their own numbers.
        """
        refuse_gradients_beyond(args)
        place = {id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        own = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad and id(a) in place}
        strangers = [a for a in args if isinstance(a, torch.nn.Parameter) and a.requires_grad and id(a) not in place]
        # Weights tied after the capture are several inputs: the first represents them.
        own = {i: own[i] for i in _first_of_each(own, without).values()}
        if strangers and not own:
            raise CaptureError(
                "TrainStep: the optimizer has none of the parameters that the model trains\n"
                "  fix:   make the optimizer from model.parameters(), once the model is complete"
            )
        known = {id(a) for a in own.values()}
        absent = dict(zip(count(-1, -1), (p for key, p in pending.items() if key not in known and key in place)))
        refuse_several_devices([*own.values(), *absent.values()])
        everything = own | absent
        return sorted(everything, key=lambda i: place[id(everything[i])]), absent

    def _parts(
        self, captured: CapturedStep, args: Sequence[Any], trained: list[int], absent: dict[int, Tensor], last: bool
    ) -> tuple[StepParts, str, list[Copy]]:
        """Return a step's parts, the description of its update, and the weight copies that it reads."""
        state = self.state
        names = captured.names
        for i in captured.sparse_tables():  # tracing fails on data-dependent sizes before it finds this
            if i in trained:
                refuse_sparse(names[i])
        known = dict(enumerate(args)) | absent
        parameters = [known[i] for i in trained]
        numbers = {id(p): i for i, p in zip(trained, parameters, strict=True)}
        hoisted = [replace(h, source=numbers.get(id(args[h.source]), h.source)) for h in captured.hoisted]
        refuse_own_state("TrainStep", self.optimizer)
        updates = [] if self.watched.why_outside else group_updates(self.optimizer, parameters)
        if self.loss_scale is not None:
            self.loss_scale.to(parameters[0].device if parameters else torch.device("cpu"))
        sums = [state.sum_of(p) for p in parameters] if self.micro_batches > 1 else []
        kept = {(h.source, h.dtype): state.copy_of(args[h.source], h.dtype) for h in hoisted}
        state.refresh(kept.values())
        copies = {key: copy.low for key, copy in kept.items()}
        masters = {i: full for i in trained if (full := state.target_of(known[i])) is not known[i]}
        how = "torch's fused kernels" if self.compile == "eager" else "pointwise operations, for the compiler"
        how = f"behind the graph: {self.watched.why_outside}" if self.watched.why_outside else how
        parts = StepParts(
            forward=captured.computed(),
            args=args,
            trained=trained,
            updates=updates,
            learning_rates=[state.rate_of(u.group) for u in updates],
            accumulators=sums,
            scale=self.loss_scale,
            names=names,
            hoisted=hoisted,
            copies=copies,
            masters=masters,
            ranks=self.ranks,
            absent=absent,
            absent_names=self._names_of(absent),
            by_data=captured.depends_on_data(),
            norm=None if self.clip_norm is None or not parameters else state.norm_on(parameters[0].device),
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            micro_batches=self.micro_batches,
            last=last,
            loss=captured.loss,
            outside=bool(self.watched.why_outside),
            pointwise=self.compile != "eager",
        )
        return parts, how, list(kept.values())

    def _names_of(self, absent: Mapping[int, Tensor]) -> dict[int, str]:
        """Return the names under which the model has these parameters."""
        names = {id(p): name for name, p in self.model.named_parameters()} if absent else {}
        return {i: names.get(id(p), f"parameter {-i}") for i, p in absent.items()}

    def _batch_in(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the inputs of a captured graph that are not tensors of the model."""
        own = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        return tuple(i for i, a in enumerate(args) if isinstance(a, Tensor) and id(a) not in own)

    def _lower(self, gm: GraphModule, given: list[Any]) -> Callable[..., Any]:
        device = device_of(gm)
        if self.compile == "eager":
            return with_sums_in_fp32(direct_calls(gm), self.policy, device)
        with torch.no_grad():
            run = compiler_of(self.compile, self.policy, device, whole=True, options=self.options)(gm, given)
        return with_sums_in_fp32(run, self.policy, device)

    def _step_outside(self, parameters: Sequence[Tensor], grads: Sequence[Tensor], found_inf: Tensor | None) -> None:
        """Call an optimizer outside of the graph, unless a gradient was infinite."""
        if found_inf is not None and found_inf.item():
            return
        step_with_gradients(self.optimizer, parameters, grads)


def _first_of_each(inputs: Mapping[int, Tensor], without: Collection[int]) -> dict[int, int]:
    """Return for each tensor, by its id, the first of ``inputs`` that is it, except those in ``without``."""
    found: dict[int, int] = {}
    for i, tensor in inputs.items():
        if i not in without:
            found.setdefault(id(tensor), i)
    return found
