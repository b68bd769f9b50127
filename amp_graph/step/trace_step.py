"""Builds whole steps from a captured forward with its loss: rewrites it, then traces it with backward and update.

Before: the GraphModule that Dynamo captured of ``loss_fn(model(x), y)``. After: a ``StepGraph`` that updates, or with
micro-batches one that sums gradients, and one of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from amp_graph.capture.dynamo_backend import Compile, compiler_of, with_sums_in_fp32
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.compiler_options import Options
from amp_graph.devices import device_of
from amp_graph.errors import CaptureError
from amp_graph.optim.check_optimizer import refuse_state_of_another_model
from amp_graph.optim.master_weight_updates import step_with_gradients
from amp_graph.optim.optimizer_guards import WatchedOptimizer
from amp_graph.optim.torch_fused_update import group_updates
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.passes.torch_compat.dynamo_capture import one_capture_at_a_time
from amp_graph.passes.torch_compat.dynamo_entries import weakly
from amp_graph.passes.torch_compat.dynamo_settings import collector_waits
from amp_graph.policy import Policy
from amp_graph.rewrite import rewrite_in_place
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.step.cuda_graph import Replayed
from amp_graph.step.sharded_model import ShardedModel
from amp_graph.step.step_arguments import refuse_gradients_beyond, refuse_several_devices
from amp_graph.step.step_graph import CapturedStep, StepGraph, free_tables, names_of, take_loss_mark, trace_step
from amp_graph.step.step_parts import NoGradient, StepParts, refuse_sparse
from amp_graph.step.step_ranks import Ranks
from amp_graph.step.step_state import StepState


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
    sharded: ShardedModel

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
        # Shards are cast in the graph, before they are gathered: no version counter shows all writes to a DTensor.
        shards, loss = bool(self.sharded.units), take_loss_mark(gm)
        return CapturedStep(rewritten, loss, names_of(gm), not shards, tables=free_tables(gm) if shards else {})

    def build(self, captured: CapturedStep, args: Sequence[Any]) -> StepGraph:
        """Trace the whole step for these inputs: with the update, or with micro-batches up to the gradient sums."""
        stateful = {id(p) for p in self.optimizer.state}
        try:
            return self._traced(captured, args)
        except NoGradient as found:  # torch skips parameters whose gradient is None, including decay and momentum
            unused = {id(args[i]): args[i] for i in found.args[0]}
            captured.without |= {i for i, a in enumerate(args) if id(a) in unused}
            for p in unused.values():
                if id(p) not in stateful:
                    self.optimizer.state.pop(p, None)
        return self._traced(captured, args)

    def _traced(self, captured: CapturedStep, args: Sequence[Any]) -> StepGraph:
        gm, names = captured.rewritten.gm, captured.names
        trained = self._trained(args, captured.without)
        for i in captured.sparse_tables():  # tracing fails on data-dependent sizes before it finds this
            if i in trained:
                refuse_sparse(names[i])
        numbers = {id(args[i]): i for i in trained}
        hoisted = [(numbers.get(id(args[i]), i), dtype) for i, dtype in captured.hoisted]
        copies = {(i, dtype): self.state.copy_of(args[i], dtype) for i, dtype in hoisted}
        # Another rank may have a gradient that this one does not: it then averages zeros.
        updates = self.micro_batches == 1 and numbers.keys() >= set(map(id, self.averaged()))
        parts = replace(
            self._parts(args, trained, names, updates=updates),
            forward=gm.forward,
            hoisted=hoisted,
            copies={key: copy.low for key, copy in copies.items()},
            by_data=captured.depends_on_data(),
            loss=captured.loss,
            tables=captured.tables,
        )
        in_step = self.compile == "eager" and self.policy.level != "O0"
        with one_capture_at_a_time(), collector_waits(self.compile == "eager"):
            passes = pipeline(Phase.STEP, self.policy.pipeline_options(device_of(gm))) if in_step else []
            step = trace_step(parts, self._lower, passes)
        step.come = self._coming(step.gm, updates)
        if self.cuda_graph:
            step.run = Replayed(step.run, self._batch_in(args), step.outputs)
        step.copies = list(copies.values())
        if updates:
            self._set_update(step, self.compile)
        elif step.trained:
            step.after = self.state.add_up
        return step

    def parameters(self) -> list[Tensor]:
        """Return the optimizer's parameters, in the order in which norms are summed; of shards what stands for them."""
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        return [self.sharded.stand_in(p) for p in every]

    def averaged(self) -> list[Tensor]:
        """Return the parameters whose gradients ranks average, in their order: all that the optimizer trains.

        None of a sharded model: its ranks agree on the collectives of each graph.
        """
        averages = self.ranks is not None and not self.sharded.units
        return [p for p in self.parameters() if p.requires_grad] if averages else []

    def update_of(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], absent: frozenset[int] = frozenset()
    ) -> StepGraph:
        """Trace the rest of a step behind ``grads`` of ``parameters``: a graph of these, those, and any number.

        absent: the numbers of those that this rank has no gradients of, but zeros.
        """
        plain = replace(self, compile="eager", options={}, cuda_graph=False)
        names, count = self.names_of(parameters), len(parameters)
        parts = plain._parts(parameters, list(range(count)), names, updates=True)
        args = [*parameters, *grads, torch.zeros((), device=parameters[0].device)]
        all_names = [*names, *(f"gradient of {name}" for name in names), "loss"]
        with one_capture_at_a_time():
            step = trace_step(replace(parts, args=args, names=all_names, absent=absent), plain._lower)
        step.come = self._coming(step.gm, None)
        self._set_update(step, "eager")
        return step

    def _coming(self, gm: GraphModule, part: Any) -> Callable[[], None] | None:
        """Return what is to be called before a graph with collectives; ``part``: which of a step's graphs it is."""
        plan = None if self.ranks is None else self.ranks.plan_of(gm, part, len(self.parameters()))
        return None if self.ranks is None or plan is None else partial(self.ranks.come, plan)

    def _set_update(self, step: StepGraph, compile: Compile) -> None:
        how = "torch's fused kernels" if compile == "eager" else "pointwise operations, for the compiler"
        if self.watched.why_outside:
            how = f"behind the graph: {self.watched.why_outside}"
            step.after = weakly(self._step_outside) if step.trained else None
        step.update = how

    def _trained(self, args: Sequence[Any], without: Collection[int]) -> list[int]:
        """Return the numbers of inputs that the optimizer trains, in its order, in which norms are summed."""
        refuse_gradients_beyond(args)
        place = {id(p): n for n, p in enumerate(self.parameters())}
        own = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad and id(a) in place}
        strangers = [a for a in args if isinstance(a, torch.nn.Parameter) and a.requires_grad and id(a) not in place]
        if strangers and not own:
            raise CaptureError(
                "TrainStep: the optimizer has none of the parameters that the model trains\n"
                "  fix:   make the optimizer from model.parameters(), once the model is complete"
            )
        # Weights tied after the capture are several inputs: the first represents them.
        first = {id(a): i for i, a in reversed(own.items()) if i not in without}
        return sorted(first.values(), key=lambda i: place[id(args[i])])

    def _parts(self, args: Sequence[Any], trained: list[int], names: Sequence[str], *, updates: bool) -> StepParts:
        """Return a step's parts without its forward; ``updates``: whether it updates, or sums gradients."""
        parameters = [args[i] for i in trained]
        refuse_several_devices(parameters)
        refuse_state_of_another_model("TrainStep", self.optimizer, vars(self.optimizer))
        outside = bool(self.watched.why_outside)
        known = [self.sharded.parameter(p) for p in parameters]
        groups = group_updates(self.optimizer, known) if updates and not outside else []
        if self.loss_scale is not None:
            self.loss_scale.to(parameters[0].device if parameters else torch.device("cpu"))
        return StepParts(
            of=self,
            args=args,
            trained=trained,
            names=names,
            updates=groups,
            adds=not updates and bool(trained),
            outside=outside,
        )

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """Return the names under which the model has these parameters."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names.get(id(p), f"parameter {n}") for n, p in enumerate(parameters)]

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
        known = [self.sharded.parameter(p) for p in parameters]
        whole = [self.sharded.whole(grad, p) for p, grad in zip(parameters, grads, strict=True)]
        with self.sharded.resharded():
            step_with_gradients(self.optimizer, known, whole)
