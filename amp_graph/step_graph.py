"""The whole training step as one graph: forward, backward, unscale, clip, update, loss scale.

Before: a rewritten graph that returns the loss. After: a graph of ATen operations that takes parameters, state and
batch, updates the first two in place and returns the loss. Nothing in it copies to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.embedding_rows import rows_instead_of_tables
from amp_graph.errors import CaptureError
from amp_graph.fused_update import GroupUpdate
from amp_graph.layout import laid_out_as
from amp_graph.loss_scale import LossScale
from amp_graph.passes.base import Pass
from amp_graph.passes.hoist_weight_casts import Hoisted
from amp_graph.passes.loss_scaling.operators import OPS
from amp_graph.passes.manager import Timed, run_passes
from amp_graph.passes.meta_keys import INPUT
from amp_graph.passes.needed_memory import most_bytes
from amp_graph.passes.node_value import value
from amp_graph.passes.recurrent import make_workspaces
from amp_graph.passes.text import SHORT, type_text
from amp_graph.passes.torch_private import DEPENDS_ON_DATA, any_branch_of_backward, dispatch_for_data, make_fx
from amp_graph.passes.what_pays import widening_together_pays
from amp_graph.reduce_gradients import Ranks, start_early
from amp_graph.step_state import Copy
from amp_graph.step_update import AtUpdate, StepOptions, StepUpdate, lows_of

DETACHED = (
    "TrainStep: the loss depends on no parameter that is trained: there is no gradient\n"
    "  legal: a loss computed from the model's outputs without detach(), .item() or torch.no_grad()\n"
    "  fix:   look for these in loss_fn and forward"
)
NO_SIZE = (
    "TrainStep: backward asks for a size that depends on data, and is no part of one graph: {}\n"
    "  legal: sizes that depend on data where neither forward nor backward branches on them\n"
    "  fix:   amp_graph.convert(model) with amp_graph.GradScaler, or a size that is known (a mask, no selection)"
)


@dataclass
class StepGraph:
    """One traced step, and the tensors that belong to it beside the captured graph's inputs."""

    gm: GraphModule
    state: list[Tensor]
    trained: list[int]  # which of the captured graph's inputs have gradients here
    run: Callable[..., Any] = field(repr=False)
    outputs: int  # how many the captured graph has; the gradients and found_inf follow where "after" wants them
    first_bad: Callable[[Sequence[Any]], str] = field(repr=False)  # names a gradient that is not finite
    updates: Sequence[GroupUpdate] = ()
    passes: tuple[Timed, ...] = ()
    after: Callable[..., None] | None = None  # takes parameters, gradients and found_inf
    update: str = ""  # how it updates, in words; "" where it does not
    copies: Sequence[Copy] = ()  # what it reads of weights, and writes where it updates them
    absent: dict[int, Tensor] = field(default_factory=dict)  # what it trains beside, by the numbers in ``trained``
    most_bytes: int = 0  # of what it makes, needed at the same time
    kept_bytes: int = 0  # of the heap, from step to step
    watch: Callable[[], None] | None = None  # keeps that anew where others took it; called before every run

    def __call__(self, *args: Tensor) -> Any:
        """Run the step on the captured graph's inputs and return what the captured graph returned."""
        if self.watch is not None:
            self.watch()
        with torch.no_grad():
            found = self.run(*args, *self.state)
            if self.after is None:
                return found
            count = len(self.trained)
            verdict = found[-1] if len(found) > self.outputs + count else None
            self.after(self.parameters(args), found[self.outputs : self.outputs + count], verdict)
            return found[: self.outputs]

    def parameters(self, args: Sequence[Any]) -> list[Tensor]:
        """Return what it trains, in the order of its gradients."""
        return [self.absent[i] if i in self.absent else args[i] for i in self.trained]


class NoGradient(Exception):
    """Raised amid a trace that was made for inputs to which the loss sends no gradient: their numbers."""

    def __init__(self, inputs: Sequence[int]) -> None:
        """Keep the numbers."""
        super().__init__(inputs)
        self.inputs = frozenset(inputs)


@dataclass
class StepParts:
    """What goes into a step: the captured forward, who is trained, and the state of update and scale.

    Numbers in ``trained`` are those of the captured graph's inputs, and those of ``absent``, below 0.
    """

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
    absent: dict[int, Tensor] = field(default_factory=dict)  # trained by other micro-batches of this step alone
    absent_names: Mapping[int, str] = field(default_factory=dict)
    by_data: bool = False  # whether sizes in the captured graph depend on data

    def tensor_of(self, i: int) -> Any:
        """Return the tensor of number ``i``."""
        return self.absent[i] if i in self.absent else self.args[i]

    def name_of(self, i: int) -> str:
        """Return the name of the tensor of number ``i``."""
        return self.absent_names[i] if i in self.absent else self.names[i]

    def state(self) -> list[Tensor]:
        """Return the state tensors in the order in which ``step`` takes them."""
        scale = list(self.scale.state) if self.scale is not None else []
        moments = [t for update in self.updates for states in update.states for t in states]
        weights = [*self.copies.values(), *self.absent.values(), *self.masters.values()]
        return [*scale, *self.learning_rates, *self.accumulators, *moments, *weights]

    def state_names(self) -> list[str]:
        """Return a name for each tensor of ``state``."""
        scale = ["loss scale", "good steps", "hysteresis left", "skipped steps", "bad steps at the floor"]
        names = {id(self.tensor_of(i)): self.name_of(i) for i in self.trained}
        moments = [
            f"{kind} of {names[id(p)]}"
            for update in self.updates
            for kind in update.state_names()
            for p in update.params
        ]
        sums = [f"gradient of {self.name_of(i)}" for i in self.trained] if self.accumulators else []
        rates = ["learning rate"] * len(self.learning_rates)
        copies = [f"{self.names[i]} in {SHORT[dtype]}" for i, dtype in self.copies]
        masters = [f"master of {self.name_of(i)}" for i in self.masters]
        weights = [*copies, *self.absent_names.values(), *masters]
        return [*(scale if self.scale is not None else []), *rates, *sums, *moments, *weights]

    # -- the step itself, traced ----------------------------------------------------------------------

    def step(self, *given: Any) -> Any:
        """Run one step: this is what is traced."""
        now, args, copies, sums = self._taken(given)
        outputs, now.grads = self._gradients(args, copies, now.targets, now.scale[0] if now.scale else None)
        return self._finished(now, outputs, sums)

    def finish(self, outputs: Sequence[Any], grads: Mapping[int, Tensor]) -> Any:
        """Run a step from its gradients on, where these were not traced; ``grads``: by number of input."""
        now, _, _, sums = self._taken([*self.args, *self.state()])
        now.grads = [laid_out_as(now.targets[i], _wide(grads[i])) for i in self._own()]
        return self._finished(now, outputs, sums)

    def _own(self) -> list[int]:
        """Return which of ``trained`` the captured graph computes with."""
        return [i for i in self.trained if i not in self.absent]

    def _taken(self, given: Sequence[Any]) -> tuple[AtUpdate, list[Any], dict[tuple[int, torch.dtype], Tensor], Any]:
        """Return what a step is given, by its parts: the tensors at its update, inputs, copies, sums of gradients."""
        count = len(self.args)
        args, rest = list(given[:count]), iter(given[count:])
        scale = [next(rest) for _ in range(5)] if self.scale is not None else []
        rates = [next(rest) for _ in self.learning_rates]
        sums = [next(rest) for _ in self.accumulators]
        states = [[[next(rest) for _ in names] for names in update.states] for update in self.updates]
        copies = {key: next(rest) for key in self.copies}
        known = dict(enumerate(args)) | {i: next(rest) for i in self.absent}
        targets = {i: known[i] for i in self.trained} | {i: next(rest) for i in self.masters}
        lows = lows_of(known, self.trained, copies, self.masters)
        return AtUpdate(targets, [], scale, rates, states, lows), args, copies, sums

    def _finished(self, now: AtUpdate, outputs: Sequence[Any], sums: list[Tensor]) -> Any:
        """Add up or update, and return the outputs; behind them the gradients where the optimizer is called outside."""
        found_inf = None
        if sums:
            now.grads = self._added_up(sums, now.grads)
        grads = now.grads
        if self.options.last and grads:
            found_inf = self._update().run(now)
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
        """Return the outputs, and the gradients of trained inputs: those of all their copies added up in fp32."""
        own = self._own()
        with torch.enable_grad():
            lows = _one_each([copies[h.source, h.dtype] for h in self.hoisted])
            for h, low in zip(self.hoisted, lows, strict=True):
                low.requires_grad_(h.source in own)
            outputs = self.forward(*args, *lows)
            loss = outputs[self.options.loss]
            scaled = loss if scale is None else loss * scale
            if self.options.micro_batches > 1:
                scaled = scaled / self.options.micro_batches
            sources = [(i, args[i]) for i in own]
            sources += [(h.source, low) for h, low in zip(self.hoisted, lows, strict=True) if h.source in own]
            if sources and not scaled.requires_grad:
                raise CaptureError(DETACHED)
            with any_branch_of_backward(scaled):
                leaves = [leaf for _, leaf in sources]
                found = torch.autograd.grad(scaled, leaves, allow_unused=True) if sources else ()
        parts: dict[int, list[Tensor]] = {}
        for (i, _), grad in zip(sources, found, strict=True):
            if grad is not None:
                if grad.layout is not torch.strided:
                    refuse_sparse(self.names[i])
                parts.setdefault(i, []).append(grad)
        if len(parts) < len(own):
            raise NoGradient([i for i in own if i not in parts])
        made = [laid_out_as(targets[i], self._added(parts[i])) for i in own]
        return [o.detach() if isinstance(o, Tensor) else o for o in outputs], made

    def _added(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of a parameter's gradients in fp32; one alone as it is, where the update reads that."""
        one_pass = self.options.one_pass
        if one_pass is not None and self.ranks is None and len(parts) == 1:
            return one_pass.takes(parts[0])
        if len(parts) == 1 and self._widens_together(parts[0]):
            return parts[0]
        total, *others = map(_wide, parts)
        for other in others:
            total = total + other
        return total

    def _widens_together(self, grad: Tensor) -> bool:
        """Say whether the update, which is next, casts all gradients to fp32 by few calls."""
        next_is_update = self.options.last and self.ranks is None and not self.accumulators
        plain = self.options.one_pass is None and not self.options.pointwise and not self.options.outside
        return next_is_update and plain and widening_together_pays(grad.device.type)

    def _update(self) -> StepUpdate:
        numbers = {id(self.tensor_of(i)): i for i in self.trained}
        return StepUpdate(self.updates, self.trained, numbers, self.scale, self.ranks, self.options)

    def _added_up(self, sums: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Add ``grads`` to ``sums``, and return what the update reads of these: a list of its own, which it changes."""
        own = [n for n, i in enumerate(self.trained) if i not in self.absent]
        if self.options.last and self.ranks is not None:  # one by one, for each bucket to start at its last gradient
            totals = list(sums)
            for n, grad in zip(own, grads, strict=True):
                totals[n] = sums[n] + grad
            return totals
        into = [sums[n] for n in own]
        if self.options.one_pass is not None:
            self.options.one_pass.add(into, grads)
        elif into:
            torch._foreach_add_(into, grads)
        return [s.clone() for s in sums] if self.options.outside and self.options.last else list(sums)

    def first_bad(self, args: Sequence[Any]) -> str:
        """Return the name of the first input whose gradient is not finite, computed once more and changing nothing."""
        own = [a.clone() if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter) else a for a in args]
        targets = dict(enumerate(args)) | self.masters
        scale = self.scale.scale if self.scale is not None else None
        with torch.random.fork_rng():
            _, grads = self._gradients(own, self.copies, targets, scale)
        bad = [i for i, grad in zip(self._own(), grads, strict=True) if not grad.isfinite().all()]
        return f"{self.names[bad[0]]}, of shape {tuple(args[bad[0]].shape)}" if bad else "a gradient that is gone"


def refuse_sparse(name: str) -> NoReturn:
    """Raise CaptureError for the parameter of that ``name``, whose gradient is sparse."""
    raise CaptureError(
        f"TrainStep: the gradient of {name} is sparse, which no fused update takes\n"
        "  legal: dense gradients\n"
        "  fix:   sparse=False in its embedding, or amp_graph.convert(model) with amp_graph.GradScaler"
    )


def _wide(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype.itemsize < 4 else grad


def _one_each(copies: list[Tensor]) -> list[Tensor]:
    """Return a leaf for each of ``copies``, so that the gradients of two casts of one weight add up in fp32."""
    seen: set[int] = set()
    leaves = []
    for copy in copies:
        leaves.append(copy.detach().requires_grad_(copy.requires_grad) if id(copy) in seen else copy)
        seen.add(id(copy))
    return leaves


def trace_step(
    parts: StepParts, lower: Callable[[GraphModule, list[Any]], Callable[..., Any]], passes: Sequence[Pass] = ()
) -> StepGraph:
    """Trace ``parts.step`` on fake tensors into one graph, and hand it, after ``passes``, to ``lower``."""
    given = [*parts.args, *parts.state()]
    try:
        with dispatch_for_data(parts.by_data):
            gm = _traced(parts.step, given)
    except DEPENDS_ON_DATA as error:
        raise CaptureError(NO_SIZE.format((str(error).strip().splitlines() or [""])[0])) from error
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, name in zip(inputs, [*parts.names, *parts.state_names()], strict=True):
        node.meta[INPUT] = name
    if parts.ranks is not None:
        start_early(gm)
    if parts.options.one_pass is not None:
        rows_instead_of_tables(gm)
    make_workspaces(gm)
    done = run_passes(gm, passes)
    most = most_bytes(gm)
    run = lower(gm, given)
    outputs: Any = gm.graph.output_node().args[0]
    returns_gradients = parts.options.outside and parts.options.last and parts.trained
    extra = len(parts.trained) + (parts.scale is not None) if returns_gradients else 0
    state = parts.state()
    parts.args = ()  # the first batch is not to live as long as the graph
    found = StepGraph(gm, state, parts.trained, run, len(outputs) - extra, parts.first_bad, parts.updates, done)
    found.absent, found.most_bytes = parts.absent, most
    return found


def _traced(step: Callable[..., Any], given: list[Any]) -> GraphModule:
    """Trace ``step`` on fake tensors; or, where an operator's fake fails for tensors without elements, on copies.

    Of 2.13 those of ``mse_loss_backward`` and ``native_group_norm_backward``, which divide by the number of elements,
    and that of ``upsample_nearest2d``. The kernels themselves take what is empty.
    """
    with torch.no_grad():
        try:
            found: GraphModule = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        except (ZeroDivisionError, TypeError, RuntimeError) as refusal:
            whole = all(t.numel() for t in given if isinstance(t, Tensor))
            if whole and not isinstance(refusal, ZeroDivisionError):
                raise
            copies = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in given]
            with torch.random.fork_rng(devices=[]):
                found = make_fx(step, tracing_mode="real")(*copies)
        return found


def mark_loss(loss: Tensor) -> Tensor:
    """Mark a tensor as the loss of the graph that is being captured: ``amp_graph::loss``."""
    return OPS.loss(loss)


def take_loss_mark(gm: GraphModule) -> int:
    """Take the mark out of a captured graph and return which of its outputs is the loss.

    Raises CaptureError where that is no scalar that gradients could start from.
    """
    (mark,) = [n for n in gm.graph.nodes if n.target in (OPS.loss, OPS.loss.default)]
    outputs: Any = gm.graph.output_node().args[0]
    # Behind the mark there may be a cast: a loss that was computed in low precision leaves the graph as captured.
    place = next(i for i, out in enumerate(outputs) if isinstance(out, Node) and mark in (out, *out.all_input_nodes))
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
