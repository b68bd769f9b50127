"""From a captured forward with its loss to whole steps: rewritten by the policy, then traced with backward and update.

Before: the GraphModule that Dynamo captured of ``loss_fn(model(x), y)``. After: ``StepGraph``, for one that updates and
for one that only adds gradients up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from amp_graph.backend import Compile, compiler_of
from amp_graph.check_optimizer import refuse_own_state
from amp_graph.cuda_graph import Replayed
from amp_graph.devices import device_of
from amp_graph.embedding_rows import tables_of
from amp_graph.errors import CaptureError
from amp_graph.fused_update import group_updates, why_not_fused
from amp_graph.loss_scale import LossScale
from amp_graph.name_nodes import name_nodes
from amp_graph.one_pass_update import OnePass, plan_one_pass
from amp_graph.pass_lists import passes_for_compilers, passes_for_inductor, passes_of_step
from amp_graph.passes.checkpoints import outline_checkpoints
from amp_graph.passes.direct_calls import direct_calls
from amp_graph.passes.hoist_weight_casts import Hoisted, hoist_weight_casts
from amp_graph.passes.manager import run_passes
from amp_graph.passes.torch_private import weakly
from amp_graph.policy import Policy
from amp_graph.reduce_gradients import Ranks
from amp_graph.rewrite import Rewritten, rewrite_in_place
from amp_graph.step_graph import StepGraph, StepParts, take_loss_mark, trace_step
from amp_graph.step_inputs import refuse_several_devices
from amp_graph.step_state import StepState
from amp_graph.step_update import StepOptions, lows_of
from amp_graph.update_masters import step_with_gradients


@dataclass
class CapturedStep:
    """One captured forward with its loss, and the whole steps traced from it: by whether they update."""

    rewritten: Rewritten
    loss: int  # which of the graph's outputs it is
    steps: dict[bool, StepGraph] = field(default_factory=dict)
    hoisted: list[Hoisted] | None = None  # weight casts that became inputs; known at the first call

    def hoist(self, args: Sequence[Any]) -> list[Hoisted]:
        """Return the weight casts that became inputs, and make them so at the first call, which tells weights apart."""
        if self.hoisted is None:
            gm = self.rewritten.gm
            self.hoisted = hoist_weight_casts(gm, [i for i, a in enumerate(args) if isinstance(a, torch.nn.Parameter)])
            outline_checkpoints(gm, traced=True)
        return self.hoisted


@dataclass(eq=False)
class StepBuilder:
    """Builds the steps of a ``TrainStep``, whose arguments most of these are."""

    model: torch.nn.Module
    optimizer: Optimizer
    policy: Policy
    compile: Compile
    update: str
    loss_scale: LossScale | None
    clip_norm: float | None
    clip_value: float | None
    micro_batches: int
    ranks: Ranks | None
    cuda_graph: bool
    state: StepState
    is_outside: bool = False  # whether the optimizer is called behind the graph

    def __post_init__(self) -> None:
        """Ask the optimizer."""
        self.is_outside = bool(why_not_fused(self.optimizer))

    def take(self, gm: GraphModule) -> CapturedStep:
        """Rewrite a captured forward with its loss by the policy."""
        name_nodes(gm, self.model, self.model.forward)
        device = device_of(gm)
        policy = replace(self.policy, keep_outputs=True)
        last = passes_for_inductor(policy, self) if (self.compile, device) == ("inductor", "cpu") else []
        own, eager = None if device == "cpu" else device, self.compile == "eager"
        rewritten = rewrite_in_place(gm, policy, own, last, eager=eager)
        if not eager:
            run_passes(gm, passes_for_compilers(policy))
        return CapturedStep(rewritten, take_loss_mark(gm))

    def build(self, captured: CapturedStep, args: Sequence[Any], updates: bool) -> StepGraph:
        """Trace the whole step for these inputs: with the update, or only up to the sums of gradients."""
        gm, trained = captured.rewritten.gm, self._trained(args)
        parts, how = self._parts(captured, args, trained, updates)
        in_step = self.compile == "eager" and self.policy.level != "O0"
        step = trace_step(parts, self._lower, passes_of_step(self.policy, device_of(gm)) if in_step else [])
        if self.cuda_graph:
            step.run = Replayed(step.run, self._batch_in(args), step.outputs)
        step.update = how if updates else ""
        step.after = weakly(self._step_outside) if self.is_outside and updates and trained else None
        return step

    def _trained(self, args: Sequence[Any]) -> list[int]:
        """Return which inputs the optimizer trains, in its order, by which norms are added up."""
        owned = {id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        trained = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad and id(a) in owned]
        trained.sort(key=lambda i: owned[id(args[i])])
        strangers = [a for a in args if isinstance(a, torch.nn.Parameter) and a.requires_grad and id(a) not in owned]
        if strangers and not trained:
            raise CaptureError(
                "TrainStep: the optimizer has none of the parameters that the model trains\n"
                "  fix:   make the optimizer from model.parameters(), after the model is what it will be"
            )
        refuse_several_devices([args[i] for i in trained])
        return trained

    def _parts(
        self, captured: CapturedStep, args: Sequence[Any], trained: list[int], last: bool
    ) -> tuple[StepParts, str]:
        """Return what goes into a step, and how it updates, in words."""
        gm, hoisted, state = captured.rewritten.gm, captured.hoist(args), self.state
        parameters = [args[i] for i in trained]
        refuse_own_state("TrainStep", self.optimizer)
        updates = [] if self.is_outside else group_updates(self.optimizer, parameters)
        if self.loss_scale is not None:
            self.loss_scale.to(parameters[0].device if parameters else torch.device("cpu"))
        sums = [state.sum_of(p) for p in parameters] if self.micro_batches > 1 else []
        copies = {(h.source, h.dtype): state.copy_of(args[h.source], h.dtype) for h in hoisted}
        masters = {i: full for i in trained if (full := state.target_of(args[i])) is not args[i]}
        lows = {id(args[i]): low for i, low in lows_of(args, trained, copies, masters).items()}
        tables = [id(args[i]) for i in tables_of(gm) if i in trained]
        one_pass, how = plan_one_pass(self.update, self.compile, updates, state.target_of, lows, tables)
        rates = [state.rate_of(u.group) for u in updates]
        options = self._options(captured.loss, last, one_pass)
        names = [n.meta.get("amp_input", n.name) for n in gm.graph.nodes if n.op == "placeholder"][: len(args)]
        own = (trained, updates, rates, sums, self.loss_scale, options)
        return StepParts(gm.forward, args, *own, names, hoisted, copies, masters, self.ranks), how

    def _options(self, loss: int, last: bool, one_pass: OnePass | None) -> StepOptions:
        clips = self.clip_norm, self.clip_value
        pointwise = self.compile != "eager"
        return StepOptions(*clips, self.micro_batches, last, loss, self.is_outside, pointwise, one_pass)

    def _batch_in(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return which inputs of a captured graph are no tensors of the model's own."""
        own = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        return tuple(i for i, a in enumerate(args) if isinstance(a, Tensor) and id(a) not in own)

    def _lower(self, gm: GraphModule, given: list[Any]) -> Callable[..., Any]:
        if self.compile == "eager":
            return direct_calls(gm)
        with torch.no_grad():
            return compiler_of(self.compile, self.policy, device_of(gm), whole=True)(gm, given)

    def _step_outside(self, parameters: Sequence[Tensor], grads: Sequence[Tensor], found_inf: Tensor | None) -> None:
        """Call an optimizer that is no part of the graph, unless a gradient was infinite."""
        if found_inf is not None and found_inf.item():
            return
        step_with_gradients(self.optimizer, parameters, grads)
