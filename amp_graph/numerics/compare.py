"""Compares a plan with fp64, fp32 and autocast, operation by operation, on batches.

Before: a model whose loss is worse in bf16. After: ``compare(model, batches, loss_fn).text()``, whose first line names
the layer and the operation that introduce most of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.capture.sensitivity_sample import captured_by
from amp_graph.devices import device_of_model
from amp_graph.errors import CalibrationError
from amp_graph.lists.errors import first_line
from amp_graph.model_state import ModelState, restored, unwritten
from amp_graph.numerics.batches import (
    LossFn,
    checked,
    differentiate,
    output_and_loss,
    refuse_infinite,
    to_measure,
)
from amp_graph.numerics.comparison import Comparison, Operation
from amp_graph.numerics.differences import Against, Differences, Reference, scale_for_fp16
from amp_graph.numerics.exact_runs import Checked, Restoring, Widened
from amp_graph.passes.calibration.node_keys import module_of, node_keys
from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.bodies import bodies_of
from amp_graph.passes.graph.node_info import source_line
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.policy import Policy
from amp_graph.rewrite import Rewritten, copy_graph, has_values, read_values, ready_to_plan, rewrite_in_place

FP64, FP32, PLAN, AUTOCAST = "fp64", "fp32", "plan", "autocast"
MODES = (FP64, FP32, PLAN, AUTOCAST)
ROOM = 16.0  # by which the scaled gradients stay below the largest number of fp16


def compare(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    policy: Policy | str | None = None,
) -> Comparison:
    """Return the errors of ``policy``'s plan, layer by layer, worst first, beside those of autocast and of fp32.

    model, batches, loss_fn: as for ``amp_graph.calibrate``. Without a loss, the outputs are summed with fixed
    random weights, so that gradients exist. policy: as for ``convert``.

    Each batch runs forward and backward four times through the captured graphs, node by node: in fp64 (the reference;
    fp32 if an operation has no fp64 kernel, which the result says), in fp32, with the plan's precisions and casts, and
    under torch.autocast. All values and gradients of one batch are in memory at once, in fp64. The passes of one device
    (``skip=backend``) are left out of the plan: their kernels compute the same. Errors are relative L2 errors.

    An operation *introduces* the error of its result less what the errors of its inputs cause: the difference from the
    same operation in fp64 on the same inputs, weighted by the gradients of the loss, relative to the outputs; and the
    same for the gradients that its backward returns. The model is unchanged afterwards.

    Raises CalibrationError (no batches, batches of another structure, a loss that is not finite), CaptureError,
    PolicyError, ListError. Sources: ``amp.debugging.compare_accuracy`` of Paddle, which compares values unweighted; the
    first-order weights are those of P. Molchanov et al., CVPR 2019.
    """
    model, asked = to_measure("compare", model, loss_fn, policy)
    comparing = _Comparing(asked, device_of_model(model) or "cpu")
    with captured_by(model, asked, comparing.take, caller="compare") as before:
        comparing.before = before
        for number, batch in checked("compare", batches):
            _compare_batch(model, loss_fn, batch, number, comparing)
    return Comparison(
        comparing.operations(), str(asked), type(model).__name__, number + 1, comparing.reference, comparing.scale,
        comparing.autocast_failed,
    )  # fmt: skip


def _compare_batch(
    model: torch.nn.Module, loss_fn: LossFn | None, batch: tuple[Any, ...], number: int, comparing: _Comparing
) -> None:
    """Run one batch in all modes, each from the same state of the model, of the batch and of the generators."""
    for mode in MODES:
        if mode == AUTOCAST and comparing.autocast_failed:
            return
        try:
            _run(model, loss_fn, batch, number, mode, comparing)
        except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
            comparing.leaves.clear()
            if mode == AUTOCAST:
                comparing.autocast_failed = first_line(error)
                for graph in comparing.graphs:
                    graph.found[AUTOCAST] = Differences()
            elif mode == FP64 and comparing.wide == FP64:
                comparing.wide, comparing.reference = FP32, f"fp32, as fp64 failed: {first_line(error)}"
                _run(model, loss_fn, batch, number, mode, comparing)
            else:
                raise


def _run(
    model: torch.nn.Module,
    loss_fn: LossFn | None,
    batch: tuple[Any, ...],
    number: int,
    mode: str,
    comparing: _Comparing,
) -> None:
    """Run forward, loss and backward in one mode."""
    comparing.begin(mode)
    with unwritten(batch), restored(comparing.before):
        with comparing.region():
            out, loss = output_and_loss(model, loss_fn, batch)
            if mode in (FP64, FP32):
                refuse_infinite("compare", loss, number)
            loss = projected(out) if loss is None else loss
        differentiate(model, loss, comparing.leaves, comparing.loss_scale)


def projected(out: Any) -> torch.Tensor | None:
    """Return a sum of outputs with fixed random weights; None if no output requires gradients."""

    def part(leaf: torch.Tensor) -> torch.Tensor:
        weights = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(leaf.numel()))
        return (leaf * weights.to(leaf.device, leaf.dtype)).sum() / math.sqrt(leaf.numel())

    parts = [part(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad and t.numel()]
    return sum(parts[1:], parts[0]) if parts else None


def planned(gm: GraphModule, policy: Policy, device: str | None) -> Rewritten:
    """Return a copy of a captured graph as planned, without the passes of one device.

    It is planned whatever time its roundings take, unless the policy says what to do then.
    """
    without = tuple(dict.fromkeys((*policy.skip, "backend")))
    asked = replace(policy, skip=without, skip_unprofitable=policy.skip_unprofitable or "false")
    return rewrite_in_place(copy_graph(gm), asked, device)


@dataclass(eq=False)
class ComparedGraph:
    """One captured graph, or one inside of another, in four forms, and what was found of it.

    ``forms``: by mode, the graph and who writes in it; their nodes have the same names as far as they are the same.
    ``keys``: of the operations that are compared. ``is_whole``: whether it is no graph inside of another. ``refs``: a
    reference for each run of a batch; ``pending``: those that the mode of the moment has not met. ``bodies``: what runs
    the graphs inside it.
    """

    forms: dict[str, tuple[GraphModule, Memory]]
    keys: dict[Node, str]
    is_whole: bool
    refs: list[Reference] = field(default_factory=list)
    pending: Iterator[Reference] = field(default_factory=lambda: iter(()))
    bodies: dict[str, Callable[..., Any]] = field(default_factory=dict)
    found: dict[str, Differences] = field(default_factory=lambda: {mode: Differences() for mode in MODES[1:]})

    def outputs(self) -> list[str]:
        """Return the names of what leaves the captured graph."""
        return [n.name for n in self.forms[FP64][0].graph.output_node().all_input_nodes] if self.is_whole else []

    def sink(self, mode: str, scale: float, unit: float) -> Reference | Against:
        """Return what takes the next run: its reference, or what compares it; a run that fp64 has not made is alone."""
        if mode == FP64:
            gm, memory = self.forms[FP64]
            self.refs.append(Reference(frozenset(n.name for n in gm.graph.nodes if memory.is_written(n))))
            return self.refs[-1]
        return Against(next(self.pending, None) or Reference(), self.found[mode], scale, unit)


@dataclass(eq=False)
class _Comparing:
    """Takes the graphs of a model, and runs them in the mode of the moment."""

    policy: Policy
    device: str
    graphs: list[ComparedGraph] = field(default_factory=list)
    mode: str = FP64
    wide: str = FP64  # the mode of the reference
    reference: str = "fp64"
    scale: float = 1.0
    autocast_failed: str = ""  # why torch.autocast could not run it
    before: ModelState = field(init=False)
    leaves: list[torch.Tensor] = field(default_factory=list)
    _unit: float = 1.0

    def take(self, gm: GraphModule) -> Runner:
        """Prepare the four forms of a captured graph; return what runs that of the mode."""
        return self._runner(gm, copy_graph(gm), planned(gm, self.policy, self.device).gm, is_whole=True)

    def _runner(
        self, gm: GraphModule, prepared: GraphModule, plan: GraphModule, *, is_whole: bool
    ) -> Callable[..., Any]:
        """Return what runs a graph in the mode of the moment; it and the graphs inside it are compared from now on."""
        memory = ready_to_plan(prepared, self.policy, self.device).memory
        read_values(gm)
        forms = {FP64: (prepared, memory), FP32: (prepared, memory), AUTOCAST: (gm, observe(gm, {}))}
        forms[PLAN] = plan, observe(plan, marks(plan))
        graph = ComparedGraph(forms, node_keys(prepared), is_whole)
        self.graphs.append(graph)
        for body in bodies_of(prepared):
            if has_values(body.graph):
                graph.bodies[body.name] = self._runner(
                    getattr(gm, body.name), body.graph, getattr(plan, body.name), is_whole=False
                )
        return partial(self._run, graph)

    def begin(self, mode: str) -> None:
        """Start a mode; of the reference, forget the batch before."""
        if mode == FP64:
            for graph in self.graphs:
                graph.refs = []
        elif self.mode == FP64:
            self._unit = math.hypot(*(ref.weight(g.outputs()) for g in self.graphs for ref in g.refs)) or 1.0
            if self.policy.torch_dtype(self.device) == torch.float16:  # no gradient of this batch overflows with it
                grads = (g for graph in self.graphs for ref in graph.refs for g in ref.gradients.values())
                self.scale = scale_for_fp16(grads, ROOM)
        for graph in self.graphs:
            graph.pending = iter(graph.refs)
        self.mode = mode

    def _run(self, graph: ComparedGraph, *args: Any) -> Any:
        """Run a graph; its outputs have their captured dtypes."""
        sink = graph.sink(self.mode, self.loss_scale, self._unit)
        form = self.wide if self.mode == FP64 else self.mode
        kind = {FP64: Widened, PLAN: Checked}.get(form, Restoring)
        gm, memory = graph.forms[form]
        observer = kind(gm, sink, memory, graph.bodies)
        observer.is_whole = graph.is_whole
        with self.region(cache_enabled=False):
            result = observer.run(*args)
        self.leaves += observer.leaves if graph.is_whole else []
        return result

    @property
    def loss_scale(self) -> float:
        """The loss scale of the mode."""
        return self.scale if self.mode in (PLAN, AUTOCAST) else 1.0

    def region(self, *, cache_enabled: bool = True) -> AbstractContextManager[Any]:
        """Return the region of forward and loss: ``torch.autocast`` in its mode, as in a loop written by hand."""
        if self.mode != AUTOCAST:
            return nullcontext()
        return torch.autocast(self.device, self.policy.torch_dtype(self.device), cache_enabled=cache_enabled)

    def operations(self) -> tuple[Operation, ...]:
        """Return what was found, by operation, worst first; operations of several graphs with one key join."""
        found: dict[str, Operation] = {}
        for graph in self.graphs:
            precisions = {n.name: (m.precision, m.reason) for n, m in marks(graph.forms[PLAN][0]).items()}
            for node, key in graph.keys.items():
                one = _operation(node, key, graph, precisions.get(node.name, ("captured", "")))
                if one is not None and (key not in found or one.introduced > found[key].introduced):
                    found[key] = one
        if not found:
            raise CalibrationError("compare: no operation has a floating-point value\n  fix:   compare another model")
        return tuple(sorted(found.values(), key=lambda one: (-one.introduced, -(one.error or 0.0))))


def _operation(node: Node, key: str, graph: ComparedGraph, planned: tuple[str, str]) -> Operation | None:
    plan = graph.found[PLAN]
    if node.name not in plan.values:
        return None
    found = [graph.found[mode] for mode in (PLAN, AUTOCAST, FP32)]
    sums = [one.values.get(node.name) for one in found] + [one.gradients.get(node.name) for one in found]
    return Operation(
        key, module_of(key), *planned, source_line(node), max(plan.forward[node.name], plan.backward[node.name]),
        *(None if one is None else one.error for one in sums),
    )  # fmt: skip
