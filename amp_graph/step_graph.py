"""The whole training step as one graph: forward, backward, unscale, clip, update, loss scale.

Before: a rewritten graph that returns the loss. After: a graph of ATen operations that takes parameters, state and
batch, updates the first two in place and returns the loss. Nothing in it copies to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.errors import CaptureError
from amp_graph.fused_update import GroupUpdate
from amp_graph.loss_scale import LossScale
from amp_graph.passes.base import Pass
from amp_graph.passes.hoist_weight_casts import Hoisted
from amp_graph.passes.manager import Timed, run_passes
from amp_graph.passes.node_value import value
from amp_graph.passes.recurrent import make_workspaces
from amp_graph.passes.text import SHORT, type_text
from amp_graph.passes.torch_private import make_fx
from amp_graph.reduce_gradients import Ranks, start_early
from amp_graph.scale_ops import OPS


@dataclass(frozen=True)
class StepOptions:
    """What a step does beside computing gradients."""

    clip_norm: float | None = None
    clip_value: float | None = None
    micro_batches: int = 1
    last: bool = True  # whether this graph is of the last micro-batch, the one that updates
    loss: int = 0  # which output of the captured graph is the loss
    outside: bool = False  # whether the optimizer is called behind the graph, which then returns the gradients
    pointwise: bool = False  # whether the update is written in pointwise operations, for a compiler to fuse


@dataclass
class StepGraph:
    """One traced step, and the tensors that belong to it beside the captured graph's inputs."""

    gm: GraphModule
    state: list[Tensor]
    trained: list[int]  # which of the captured graph's inputs have gradients here
    run: Callable[..., Any] = field(repr=False)
    outputs: int  # how many the captured graph has; the gradients and found_inf follow where "after" wants them
    first_bad: Callable[[Sequence[Any]], str] = field(repr=False)  # names a gradient that is not finite
    passes: tuple[Timed, ...] = ()
    after: Callable[..., None] | None = None  # takes parameters, gradients and found_inf

    def __call__(self, *args: Tensor) -> Any:
        """Run the step on the captured graph's inputs and return what the captured graph returned."""
        with torch.no_grad():
            found = self.run(*args, *self.state)
            if self.after is None:
                return found
            count = len(self.trained)
            verdict = found[-1] if len(found) > self.outputs + count else None
            self.after([args[i] for i in self.trained], found[self.outputs : self.outputs + count], verdict)
            return found[: self.outputs]


@dataclass
class StepParts:
    """What goes into a step: the captured forward, who is trained, and the state of update and scale."""

    forward: Callable[..., Any]
    args: Sequence[Any]
    trained: list[int]
    updates: list[GroupUpdate]
    learning_rates: list[Tensor]
    accumulators: list[Tensor]
    scale: LossScale | None
    options: StepOptions
    names: Sequence[str] = ()  # of the captured graph's inputs
    hoisted: Sequence[Hoisted] = ()  # the graph's further inputs, one a weight cast
    copies: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)  # what they read, by input and dtype
    masters: dict[int, Tensor] = field(default_factory=dict)  # what is updated in the place of inputs in low precision
    ranks: Ranks | None = None

    def state(self) -> list[Tensor]:
        """Return the state tensors in the order in which ``step`` takes them."""
        scale = list(self.scale.state) if self.scale is not None else []
        moments = [t for update in self.updates for states in update.states for t in states]
        weights = [*self.copies.values(), *self.masters.values()]
        return [*scale, *self.learning_rates, *self.accumulators, *moments, *weights]

    def state_names(self) -> list[str]:
        """Return a name for each tensor of ``state``."""
        scale = ["loss scale", "good steps", "hysteresis left", "skipped steps", "bad steps at the floor"]
        names = {id(a): name for a, name in zip(self.args, self.names, strict=True)}
        moments = [
            f"{kind} of {names[id(p)]}"
            for update in self.updates
            for kind in update.state_names()
            for p in update.params
        ]
        sums = [f"gradient of {names[id(self.args[i])]}" for i in self.trained] if self.accumulators else []
        rates = ["learning rate"] * len(self.learning_rates)
        copies = [f"{self.names[i]} in {SHORT[dtype]}" for i, dtype in self.copies]
        masters = [f"master of {self.names[i]}" for i in self.masters]
        return [*(scale if self.scale is not None else []), *rates, *sums, *moments, *copies, *masters]

    # -- the step itself, traced ----------------------------------------------------------------------

    def step(self, *given: Any) -> Any:
        """Run one step: this is what is traced."""
        count = len(self.args)
        args, rest = list(given[:count]), iter(given[count:])
        scale = [next(rest) for _ in range(5)] if self.scale is not None else []
        rates = [next(rest) for _ in self.learning_rates]
        sums = [next(rest) for _ in self.accumulators]
        states = [[[next(rest) for _ in names] for names in update.states] for update in self.updates]
        copies = {key: next(rest) for key in self.copies}
        targets = {i: args[i] for i in self.trained} | {i: next(rest) for i in self.masters}
        outputs, grads = self._gradients(args, copies, targets, scale[0] if scale else None)
        found_inf = None
        if sums:
            torch._foreach_add_(sums, grads)
            grads = [s.clone() for s in sums] if self.options.outside and self.options.last else sums
        if self.options.last and grads:
            found_inf = self._finish(targets, grads, scale, rates, states)
            if not self.options.outside:
                self._write_copies(args, targets, copies)
            if sums:
                torch._foreach_zero_(sums)
        if not self.options.outside or not self.options.last:
            return tuple(outputs)
        return (*outputs, *grads, *(() if found_inf is None else (found_inf,)))

    def _gradients(
        self,
        args: list[Any],
        copies: dict[tuple[int, torch.dtype], Tensor],
        targets: dict[int, Tensor],
        scale: Tensor | None,
    ) -> tuple[Any, list[Tensor]]:
        """Return the outputs, and the gradients of what is trained: those of all its copies added up in fp32."""
        with torch.enable_grad():
            lows = _one_each([copies[h.source, h.dtype] for h in self.hoisted])
            outputs = self.forward(*args, *lows)
            loss = outputs[self.options.loss]
            scaled = loss if scale is None else loss * scale
            if self.options.micro_batches > 1:
                scaled = scaled / self.options.micro_batches
            sources = [(i, args[i]) for i in self.trained]
            sources += [(h.source, low) for h, low in zip(self.hoisted, lows, strict=True) if h.source in targets]
            found = torch.autograd.grad(scaled, [leaf for _, leaf in sources], allow_unused=True) if sources else ()
        grads: dict[int, Tensor] = {}
        for (i, _), grad in zip(sources, found, strict=True):
            if grad is not None:
                self._refuse_sparse(i, grad)
                wide = grad.float() if grad.dtype.itemsize < 4 else grad
                grads[i] = grads[i] + wide if i in grads else wide
        made = [
            _laid_out_as(targets[i], grads[i]) if i in grads else torch.zeros_like(targets[i]) for i in self.trained
        ]
        return [o.detach() if isinstance(o, Tensor) else o for o in outputs], made

    def first_bad(self, args: Sequence[Any]) -> str:
        """Return the name of the first input whose gradient is not finite, computed once more and changing nothing."""
        own = [a.clone() if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter) else a for a in args]
        targets = {i: args[i] for i in self.trained} | self.masters
        scale = self.scale.scale if self.scale is not None else None
        with torch.random.fork_rng():
            _, grads = self._gradients(own, self.copies, targets, scale)
        bad = [i for i, grad in zip(self.trained, grads, strict=True) if not grad.isfinite().all()]
        return f"{self.names[bad[0]]}, of shape {tuple(args[bad[0]].shape)}" if bad else "a gradient that is gone"

    def _refuse_sparse(self, i: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise CaptureError(
                f"TrainStep: the gradient of {self.names[i]} is sparse, which no fused update takes\n"
                "  legal: dense gradients\n"
                "  fix:   sparse=False in its embedding, or amp_graph.convert(model) with amp_graph.GradScaler"
            )

    def _finish(
        self, targets: dict[int, Tensor], grads: list[Tensor], scale: list[Tensor], rates: list[Tensor], states: Any
    ) -> Tensor | None:
        """Average, unscale, clip, update and move the scale; gradients are in the order of ``trained``."""
        if self.ranks is not None:
            grads[:] = self.ranks.average(grads)
        found_inf = None
        if self.scale is not None:
            found_inf = torch.zeros_like(scale[0])
            inverse = scale[0].double().reciprocal().float()
            OPS.check_finite_and_unscale_(grads, inverse, found_inf)
        _clip(grads, self.options)
        by_parameter = {id(self.args[i]): (targets[i], grad) for i, grad in zip(self.trained, grads, strict=True)}
        for update, lr, state in zip(self.updates, rates, states, strict=True):
            pairs = [by_parameter[id(p)] for p in update.params]
            apply = update.apply_pointwise if self.options.pointwise else update.apply
            apply([p for p, _ in pairs], [g.to(p.dtype) for p, g in pairs], state, lr, found_inf)
        if self.scale is not None and found_inf is not None:
            OPS.update_loss_scale_(*scale, found_inf, *self.scale.options())
        return found_inf

    def _write_copies(
        self, args: list[Any], targets: dict[int, Tensor], copies: dict[tuple[int, torch.dtype], Tensor]
    ) -> None:
        """Round what was updated into the copies that the next forward reads."""
        pairs = [(low, targets[i]) for (i, _), low in copies.items() if i in targets]
        pairs += [(args[i], targets[i]) for i in self.masters]
        if self.options.pointwise:
            for low, full in pairs:
                low.copy_(full)
        elif pairs:
            torch._foreach_copy_([low for low, _ in pairs], [full for _, full in pairs])


def _one_each(copies: list[Tensor]) -> list[Tensor]:
    """Return a leaf for each of ``copies``, so that the gradients of two casts of one weight add up in fp32."""
    seen: set[int] = set()
    leaves = []
    for copy in copies:
        leaves.append(copy.detach().requires_grad_(copy.requires_grad) if id(copy) in seen else copy)
        seen.add(id(copy))
    return leaves


def _laid_out_as(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad`` in the layout of its parameter, as ``.grad`` has it: fused kernels go through both by memory.

    Convolutions of channels_last images give their weights gradients in that layout.
    """
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)


def _clip(grads: list[Tensor], options: StepOptions) -> None:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` do, operation by operation."""
    if options.clip_norm is not None:
        norms = torch._foreach_norm(grads, 2.0)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        torch._foreach_mul_(grads, torch.clamp(options.clip_norm / (total + 1e-6), max=1.0))
    if options.clip_value is not None:
        torch._foreach_clamp_min_(grads, -options.clip_value)
        torch._foreach_clamp_max_(grads, options.clip_value)


def trace_step(
    parts: StepParts, lower: Callable[[GraphModule, list[Any]], Callable[..., Any]], passes: Sequence[Pass] = ()
) -> StepGraph:
    """Trace ``parts.step`` on fake tensors into one graph, and hand it, after ``passes``, to ``lower``."""
    given = [*parts.args, *parts.state()]
    with torch.no_grad():
        gm = make_fx(parts.step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, name in zip(inputs, [*parts.names, *parts.state_names()], strict=True):
        node.meta["amp_input"] = name
    if parts.ranks is not None:
        start_early(gm)
    make_workspaces(gm)
    done = run_passes(gm, passes)
    run = lower(gm, given)
    outputs: Any = gm.graph.output_node().args[0]
    returns_gradients = parts.options.outside and parts.options.last and parts.trained
    extra = len(parts.trained) + (parts.scale is not None) if returns_gradients else 0
    state = parts.state()
    parts.args = ()  # the first batch is not to live as long as the graph
    return StepGraph(gm, state, parts.trained, run, len(outputs) - extra, parts.first_bad, done)


def mark_loss(loss: Tensor) -> Tensor:
    """Mark a tensor as the loss of the graph that is being captured: ``amp_graph::loss``."""
    return OPS.loss(loss)


def take_loss_mark(gm: GraphModule) -> int:
    """Take the mark out of a captured graph and return which of its outputs is the loss.

    Raises CaptureError where that is no scalar that gradients could start from.
    """
    (mark,) = [n for n in gm.graph.nodes if n.target in (OPS.loss, OPS.loss.default)]
    outputs: Any = gm.graph.output_node().args[0]
    place = list(outputs).index(mark)
    found = value(mark)
    if found.numel() != 1 or not found.is_floating_point():
        raise CaptureError(
            f"TrainStep: the loss is {type_text(found)}\n  legal: one floating-point number\n"
            "  fix:   reduce it in loss_fn, for example by .mean()"
        )
    mark.replace_all_uses_with(mark.args[0])
    gm.graph.erase_node(mark)
    gm.recompile()
    return place
