"""``TrainStep``: forward, backward, unscale, clip, update and loss scale as one graph without host syncs.

Before: ``zero_grad``, autocast, ``scaler.scale(loss).backward()``, ``unscale_``, clip, ``step``, ``update``. After:
``loss = step(inputs, targets)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.dynamo_backend import Captured, Compile, check_compile
from amp_graph.capture.recapture_limits import MOST, check_max_graphs
from amp_graph.compiler_options import read_options, refuse_recording
from amp_graph.convert import convert, warn_of_unmatched
from amp_graph.errors import CaptureError, ScaleError
from amp_graph.lists.errors import Undo
from amp_graph.optim.check_optimizer import refuse_hooks, unwrapped
from amp_graph.optim.master_weights import unchanged_where_it_raises
from amp_graph.optim.optimizer_guards import WatchedOptimizer
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.torch_compat.dispatch import is_autocast_on
from amp_graph.passes.torch_compat.optimizers import load_hooks_of
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW
from amp_graph.scaling.loss_scale import FloorWatch, LossScale
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer
from amp_graph.step.choose_step import StepRuns, beside_traced
from amp_graph.step.cuda_graph import check_cuda_graph
from amp_graph.step.sharded_model import ShardedModel, refuse_other_sharding
from amp_graph.step.step_arguments import (
    make_loss_scale,
    policy_of,
    refuse,
    refuse_options,
    refuse_surroundings,
    split_batch,
)
from amp_graph.step.step_cache import CapturedSteps
from amp_graph.step.step_graph import CapturedStep, StepGraph
from amp_graph.step.step_ranks import default_group, ranks_of
from amp_graph.step.step_state import StepState
from amp_graph.step.trace_step import StepBuilder

# Fixed options of a step; those of the optimizer and the loss scale may change.
MADE_FOR = (
    *("model", "loss_fn", "optimizer", "policy", "loss_scale", "clip_norm", "clip_value", "micro_batches", "outputs"),
    *("compile", "mode", "options", "process_group", "reduce_dtype", "at_floor", "cuda_graph", "max_graphs"),
)


class TrainStep:
    """A training step of ``model`` as one graph: ``loss = step(inputs, targets)``.

    loss_fn: called as ``loss_fn(model(inputs), *targets)``; a tuple or dict of inputs is unpacked as the model's
    arguments. None: the model computes its loss, and returns it or has it in ``.loss`` or ``["loss"]``.
    optimizer: over the model's parameters. SGD, Adam, AdamW and Adagrad update inside the graph with their fused
    kernels; any other is called after it. Learning rates are read at every step, so schedulers work.
    policy: as for ``convert``. loss_scale: "dynamic", a number, a ``LossScale``, or None for none; by default
    dynamic in fp16, none in bf16. clip_norm, clip_value: limits of the unscaled gradients. micro_batches: split the
    batch along dimension 0 into that many and average their gradients. outputs: return ``(loss, outputs)``.
    process_group: average gradients over its ranks, inside the graph; None for all ranks of an initialized
    ``torch.distributed``, False for none. reduce_dtype: dtype of the all-reduce, such as ``torch.bfloat16``; None for
    fp32. Parameters and buffers are broadcast from the first rank at the start; the loss is each rank's own.
    compile, mode, options: as for ``convert``, but for modes that record CUDA graphs, which ``cuda_graph`` replaces.
    at_floor: "warn" or "error" if gradients stay infinite at the smallest scale; on CUDA some steps later.
    cuda_graph: on a CUDA device, record the step at its fourth call and replay it from then on with a single launch;
    the results of a step are copies, its temporaries stay allocated.

    max_graphs: the limit of graphs. The first two kinds of batches are traced whole. For all others, and for models
    that are not one graph, of which a warning says why, the model runs as ``convert`` runs it, followed by autograd and
    the same update. With several ranks all steps are traced, and what is not one graph is refused.

    Each weight is cast once per optimizer step, by the update: ``forward`` reads the low-precision copies (O1) or the
    parameters themselves (O2, which converts ``model`` and updates fp32 masters). A model that ``fully_shard`` has
    sharded is planned as a whole; its shards are cast when they are gathered, and its mesh's ranks average gradients.

    A step with an infinite gradient changes no parameter and no state. ``.grad`` is not touched. New shapes, train or
    eval and other guards cause a new capture. Copies and pickles of a step include its model and optimizer.
    Raises CaptureError (a loss that is no scalar, parameters that are not the optimizer's), ScaleError,
    PolicyError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        policy: Policy | str | None = None,
        *,
        loss_scale: LossScale | str | float | None = "default",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        micro_batches: int = 1,
        outputs: bool = False,
        compile: Compile = "eager",
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        process_group: Any = None,
        reduce_dtype: torch.dtype | None = None,
        at_floor: str = "warn",
        cuda_graph: bool = False,
        max_graphs: int = MOST,
    ) -> None:
        """Prepare the step; it is captured at its first call."""
        others = {*self.__dict__}
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            process_group = model.process_group if process_group is None else process_group
            model = model.module
        optimizer = optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else unwrapped(optimizer)
        self.policy = policy_of(model, policy)
        refuse(model, loss_fn, optimizer, self.policy)
        refuse_options(micro_batches, clip_norm, clip_value, reduce_dtype, outputs)
        check_compile("TrainStep", compile)
        self.compiler_options = read_options("TrainStep", compile, mode, options)
        refuse_recording(self.compiler_options)
        floor = FloorWatch("TrainStep", at_floor)
        check_max_graphs("TrainStep", max_graphs)
        self.loss_scale = make_loss_scale(loss_scale, self.policy, model)
        refuse_hooks(optimizer)
        self.mode, self.options = mode, None if options is None else dict(options)
        self.at_floor, self.compile, self.outputs, self.micro_batches = at_floor, compile, outputs, micro_batches
        self.clip_norm, self.clip_value, self.cuda_graph = clip_norm, clip_value, cuda_graph
        self.process_group, self.reduce_dtype, self.max_graphs = process_group, reduce_dtype, max_graphs
        refuse_other_sharding(model, self.policy, compile, process_group)
        self._ranks = ranks_of(process_group, model, reduce_dtype)
        check_cuda_graph(cuda_graph, model, self._ranks)
        self._sharded = ShardedModel(model, reduce_dtype)
        self.model, self.loss_fn = model, loss_fn
        self.optimizer: Optimizer = optimizer
        lowered = model.parameters() if self._converts and conversion_of(model) is None else ()
        with unchanged_where_it_raises(model, lowered, load_hooks_of(optimizer)):
            self._make(floor)
            self._own = {*self.__dict__, "_own"} - others

    @property
    def _converts(self) -> bool:
        """Whether the step changes the model's parameters."""
        return self.policy.level in HELD_LOW or self.policy.widen

    def _make(self, floor: FloorWatch) -> None:
        """Create the parts that capture and run graphs; convert the model where its parameters change dtype."""
        model, optimizer, compile = self.model, self.optimizer, self.compile
        if self._converts and conversion_of(model) is None:
            convert(model, self.policy, max_graphs=beside_traced(self.max_graphs))
        else:
            warn_of_unmatched(model, self.policy)
        self._conversion = conversion_of(model)
        self._scale_options: tuple[float, ...] | None = None
        self._state = StepState(self._sharded)
        self._watched = WatchedOptimizer(optimizer, self.forget)
        builder = StepBuilder(
            model=model,
            optimizer=optimizer,
            policy=self.policy,
            compile=compile,
            options=self.compiler_options,
            loss_scale=self.loss_scale,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            micro_batches=self.micro_batches,
            ranks=self._ranks,
            cuda_graph=self.cuda_graph,
            state=self._state,
            watched=self._watched,
            sharded=self._sharded,
        )
        self._steps = CapturedSteps(builder, floor)
        self._runs = StepRuns(builder, self.loss_fn, self.outputs, self._steps, self.max_graphs)

    # -- the loop -------------------------------------------------------------------------------------

    def __call__(self, *batch: Any) -> Any:
        """Run one step and return the loss, a 0-d tensor without gradient; with ``outputs``, also the outputs.

        batch: the model's inputs, then what ``loss_fn`` gets after the outputs. With ``micro_batches``, dimension 0 of
        each tensor is split. The loss is in the unscaled unit, and the mean over micro-batches.

        Raises CaptureError if nothing can be trained, and ScaleError at the floor with ``at_floor="error"``.
        """
        if is_autocast_on():  # the plan decides precision
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self._step(batch)
        return self._step(batch)

    def _step(self, batch: Sequence[Any]) -> Any:
        refuse_surroundings()
        self._follow()
        self._state.read_rates(self.optimizer.param_groups)
        scale = self.loss_scale
        if scale is not None:
            scale.note()
        try:
            with self._sharded.unsharded():
                result = self._whole(batch)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers read it
        except BaseException as error:
            if scale is not None:
                scale.records.undo()
            if self._ranks is not None:
                self._ranks.tell(error)
            raise
        if self._ranks is not None:
            self._ranks.end_step()
        return result

    def _whole(self, batch: Sequence[Any]) -> Any:
        with Undo(self._state.drop_sums):
            if self.micro_batches == 1:
                return self._runs(batch)
            parts = split_batch(batch, self.micro_batches)
            found = [self._runs(part) for part in parts]
            self._steps.update_from_sums()
        losses = torch.stack([f[0] if self.outputs else f for f in found])
        return (losses.mean(), [f[1] for f in found]) if self.outputs else losses.mean()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse changes of options that the graphs depend on."""
        if name in MADE_FOR and name in self.__dict__:
            raise CaptureError(
                f"TrainStep: {name} is set to {value!r:.200}, but it is fixed once a step is made\n"
                "  legal: changes of its optimizer's, loss scale's and model's own options\n"
                f"  fix:   another TrainStep(..., {name}=...) over the same model and optimizer"
            )
        super().__setattr__(name, value)

    def _follow(self) -> None:
        """Check for outside changes since the last call, and drop graphs that they invalidate."""
        if conversion_of(self.model) is not self._conversion:
            self._follow_conversion()
        options = None if self.loss_scale is None else self.loss_scale.options()
        if self._watched.has_changed() or options != self._scale_options:
            self.forget()
        self._scale_options = options

    def _follow_conversion(self) -> None:
        """Drop captures if the model was converted or reverted after this step was made."""
        policy_of(self.model, self.policy)  # which is to be the same
        self._runs.capture()
        self._conversion = conversion_of(self.model)
        self.captured.clear()
        self._state.keep(())
        self.forget()

    # -- state ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the constructor's arguments: the copy trains a copied model and optimizer."""
        if self.process_group not in (None, False, default_group()):
            raise CaptureError(
                "TrainStep: a step with its own process group cannot be copied, as the group is a connection\n"
                "  legal: process_group=None or False\n  fix:   a new TrainStep over the copied model and optimizer"
            )
        kept = {name: value for name, value in self.__dict__.items() if name in MADE_FOR or name not in self._own}
        return {**kept, "process_group": False if self.process_group is False else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build the copy, with further attributes set by other code."""
        TrainStep.__init__(self, **{name: state[name] for name in MADE_FOR if name in state})
        self.__dict__.update({name: value for name, value in state.items() if name not in MADE_FOR})

    def forget(self) -> None:
        """Drop all traces; happens automatically if state or options of the optimizer are replaced."""
        self._state.rates.clear()
        self._steps.forget()

    def refresh(self) -> None:
        """Cast all weights again. Only needed after writes that no version counter shows: ``weight.data.add_(1)``."""
        self._state.forget_copies()

    def weight_copies(self) -> list[Tensor]:
        """The low-precision weight copies that forward reads."""
        return [copy.low for copy in self._state.copies.values()]

    @property
    def captured(self) -> list[CapturedStep]:
        """All captures so far, each with the steps traced from it."""
        return self._steps.captured

    @property
    def updates(self) -> list[StepGraph]:
        """The graphs of an update alone, behind those of micro-batches."""
        return list(self._steps.updates.values())

    @property
    def graphs(self) -> list[Captured]:
        """The captured forwards of steps, and those of the model where steps are not traced."""
        return self._runs.graphs

    @property
    def notes(self) -> list[str]:
        """The report's notes on steps that were not traced."""
        return self._runs.notes

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped, a 0-d int32 tensor; on the device from the first step on."""
        return torch.tensor(0, dtype=torch.int32) if self.loss_scale is None else self.loss_scale.skipped

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last update's unscaled gradients before they were clipped to ``clip_norm``: 0-d fp32.

        On the device, and written by every update; None before the first one and without ``clip_norm``.
        """
        return self._state.norm

    def state_dict(self) -> dict[str, Any]:
        """Return the step's own state, besides model and optimizer: that of the loss scale."""
        return {"loss_scale": self.loss_scale.state_dict() if self.loss_scale is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict`` result; for anything else raise ScaleError and change nothing."""
        given = state.get("loss_scale", ...) if isinstance(state, Mapping) else ...
        if given is ... or (given is None) != (self.loss_scale is None):
            raise ScaleError(
                f"TrainStep: the state {'has no loss scale' if given is ... or given is None else 'has a loss scale'}, "
                f"this step has {'none' if self.loss_scale is None else 'one'}\n"
                "  fix:   load what state_dict() of a TrainStep with the same loss_scale returned"
            )
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(given)

    def graph_text(self) -> str:
        """Return the traced steps as text: forward, backward, unscale, update and scale, one line per node."""
        traced = [captured.step for captured in self.captured if captured.step is not None]
        return "\n\n".join(graph_text(step.gm) for step in (*traced, *self.updates))
