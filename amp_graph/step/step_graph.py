"""Builds the graph of a whole training step: traced forward and backward, then unscale, clip, update, loss scale.

Before: a rewritten graph that returns the loss. After: a graph of ATen operations that takes parameters, state and
batch, updates the first two in place and returns the loss. Nothing in it copies to the host. One captured forward has a
graph for each set of parameters: after ``model.head = heads[task]`` between two steps, each head has its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass
from amp_graph.lists.errors import first_line
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.backends.recurrent.lstm_functions import make_workspaces
from amp_graph.passes.base import Pass
from amp_graph.passes.graph.activation_checkpoints import outline_checkpoints
from amp_graph.passes.graph.fake_values import captured, is_eligible, value
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.passes.graph.meta_keys import INPUT, LEFT_ALONE, LOW_DTYPE, MARK
from amp_graph.passes.loss_scaling.joint_graph import joint_of, name_joint, outputs, set_outputs
from amp_graph.passes.loss_scaling.operators import OPS
from amp_graph.passes.manager import Timed, run_passes
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA, depends_on_data, dispatch_for_data, make_fx
from amp_graph.passes.weights.cast_weights import hoist_weight_casts
from amp_graph.rewrite import Rewritten
from amp_graph.step.sharded_model import ShardedModel
from amp_graph.step.step_arguments import refuse_what_is_no_loss
from amp_graph.step.step_parts import StepParts
from amp_graph.step.step_state import Copy
from amp_graph.step.step_table import appended_passes, names_of_trained


class NoSize(Exception):
    """A step cannot be traced, for a size: one that depends on data, or of nothing."""


@dataclass
class StepGraph:
    """One traced step, and its own tensors in addition to the captured graph's inputs."""

    gm: GraphModule
    state: list[Tensor]
    trained: list[int]  # the captured graph's inputs that have gradients here
    run: Callable[..., Any] = field(repr=False)
    sharded: ShardedModel = field(repr=False)
    outputs: int  # how many the captured graph has; gradients, found_inf and skips follow if "after" needs them
    updates: Sequence[GroupUpdate] = ()
    passes: tuple[Timed, ...] = ()  # over the whole step, and of those that append its parts what failed
    come: Callable[[], None] | None = None  # called before its collectives, if it has some
    after: Callable[..., None] | None = None  # takes parameters, gradients and found_inf
    update: str = ""  # how it updates, in words; "" if it does not
    copies: Sequence[Copy] = ()  # low-precision copies that it reads, and writes if it updates
    absent: Sequence[int] = ()  # places in "trained" of what this rank has no gradients of

    def __call__(self, *args: Tensor) -> Any:
        """Run the step on the captured graph's inputs and return what the captured graph returned."""
        if self.come is not None:
            self.come()
        with torch.no_grad():
            found = self.run(*self.sharded.given(args), *self.state)
            if self.after is None:
                return found
            self._call_after(self.after, self.parameters(args), found[self.outputs :])
            return found[: self.outputs]

    def _call_after(self, after: Callable[..., None], parameters: list[Tensor], found: Sequence[Tensor]) -> None:
        """Call ``after`` with the gradients that any rank has, and with the verdict; ``found`` has both, and skips."""
        grads, behind = found[: len(parameters)], found[len(parameters) :]
        skips = behind[len(behind) - len(self.absent) :]
        unread = {n for n, skip in zip(self.absent, skips, strict=True) if skip.item()}
        kept = [n for n in range(len(parameters)) if n not in unread]
        verdict = behind[0] if len(behind) > len(skips) else None
        after([parameters[n] for n in kept], [grads[n] for n in kept], verdict)

    def parameters(self, args: Sequence[Any]) -> list[Tensor]:
        """Return the trained parameters, in the order of their gradients."""
        return [args[i] for i in self.trained]


def trace_step(
    parts: StepParts, lower: Callable[[GraphModule, list[Any]], Callable[..., Any]], passes: Sequence[Pass] = ()
) -> StepGraph:
    """Trace forward and backward, run ``passes``, append the rest of a step, and hand the graph to ``lower``."""
    gm = trace_joint(parts)
    make_workspaces(gm)
    inputs = dict(enumerate(n.name for n in gm.graph.find_nodes(op="placeholder")))
    count = len(outputs(gm)) - len(parts.trained)
    appended, tensors = appended_passes(parts, count, inputs)
    done = run_passes(gm, [*passes, *appended])
    state = [*parts.copies.values(), *(tensors[name] for name in joint_of(gm).inputs)]
    run = lower(gm, [*parts.of.sharded.given(parts.args), *state])
    parts.args = ()  # do not keep the first batch alive
    absent = [n for n, i in enumerate(parts.trained) if i in parts.absent]
    told = (*done[: len(passes)], *(timed for timed in done[len(passes) :] if timed.failure))
    return StepGraph(
        gm,
        state,
        parts.trained,
        run,
        parts.of.sharded,
        count,
        parts.updates,
        told,
        absent=absent,
    )


def trace_joint(parts: StepParts) -> GraphModule:
    """Trace forward and backward on fake tensors into one graph, which names its loss and its gradients."""
    try:
        with dispatch_for_data(parts.by_data):
            gm = _traced(parts.forward_and_backward, [*parts.args, *parts.copies.values()])
    except DEPENDS_ON_DATA as error:
        what = "backward needs a data-dependent size, such as that of a selection by a mask"
        raise NoSize(f"{what}: {first_line(error)}") from error
    inputs = gm.graph.find_nodes(op="placeholder")
    copies = [f"{parts.names[i]} in {SHORT[dtype]}" for i, dtype in parts.copies]
    for node, name in zip(inputs, [*parts.names, *copies], strict=True):
        node.meta["amp_input"] = name
    *outs, seed = outputs(gm)
    set_outputs(gm, outs)
    names = names_of_trained(parts)
    count = len(outs) - len(names)
    gradients = {name: count + n for n, name in enumerate(names.values())}
    name_joint(gm, gradients, loss=parts.loss, seed=seed, parameters={name: inputs[i] for i, name in names.items()})
    return gm


def _traced(step: Callable[..., Any], given: list[Any]) -> GraphModule:
    """Trace ``step`` on fake tensors; NoSize where an operator's fake kernel fails for empty tensors.

    In torch 2.13 those are ``mse_loss_backward`` and ``native_group_norm_backward``, which divide by the number of
    elements, and ``upsample_nearest2d``. The real kernels accept empty tensors.
    """
    with torch.no_grad():
        try:
            found: GraphModule = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        except (ZeroDivisionError, TypeError, RuntimeError) as refusal:
            whole = all(t.numel() for t in given if isinstance(t, Tensor))
            if whole and not isinstance(refusal, ZeroDivisionError):
                raise
            raise NoSize("an operator of torch cannot be traced with empty tensors") from refusal
        return found


def mark_loss(loss: Tensor) -> Tensor:
    """Mark a tensor as the loss of the graph that is being captured: ``amp_graph::loss``."""
    if not isinstance(loss, Tensor):
        refuse_what_is_no_loss(loss)
    return OPS.loss(loss)


def take_loss_mark(gm: GraphModule) -> int:
    """Remove the mark from a captured graph and return the index of the output that is the loss.

    Raises CaptureError if that is not a differentiable scalar.
    """
    (mark,) = [n for n in gm.graph.nodes if n.target in (OPS.loss, OPS.loss.default)]
    outputs: Any = gm.graph.output_node().args[0]
    # A cast may follow the mark: a loss computed in low precision is cast back to its captured dtype.
    place = next(i for i, out in enumerate(outputs) if isinstance(out, Node) and mark in (out, *out.all_input_nodes))
    refuse_what_is_no_loss(value(mark))
    mark.replace_all_uses_with(mark.args[0])
    gm.graph.erase_node(mark)
    gm.recompile()
    return place


# -- a captured forward, and the steps traced from it ----------------------------------------------------


EMBEDDINGS = (F.embedding, F.embedding_bag)


@dataclass(eq=False)
class Bound:
    """The parameters of a captured forward's call, and the step traced for them."""

    parameters: tuple[Tensor, ...]
    step: StepGraph | None = None


@dataclass
class CapturedStep:
    """One captured forward with its loss, and the whole steps traced from it."""

    rewritten: Rewritten
    loss: int  # index of the loss among the graph's outputs
    names: list[str]  # of the inputs
    hoists: bool = True  # whether casts of weights become inputs
    hoisted: list[tuple[int, torch.dtype]] = field(default_factory=list)  # weight casts that became inputs
    numbers: tuple[int, ...] | None = None  # the graph's inputs that are parameters; known after the first call
    bounds: list[Bound] = field(default_factory=list)  # the one in use first
    without: frozenset[int] = frozenset()  # inputs on which the loss does not depend
    tables: Mapping[int, torch.dtype] = field(default_factory=dict)  # inputs whose lookups may be in this dtype
    refused: str = ""  # why no step can be traced

    def sparse_tables(self) -> Collection[int]:
        """Return the inputs that embeddings read whose gradients are sparse."""
        return [i for i, _, given in _lookups(self.rewritten.gm) if given.get("sparse") is True]

    def depends_on_data(self) -> bool:
        """Return whether sizes or numbers in the graph depend on data."""
        return any(depends_on_data(value(node)) for node in self.rewritten.gm.graph.nodes)

    @property
    def step(self) -> StepGraph | None:
        """The step for the parameters of the last call."""
        return self.bounds[0].step if self.bounds else None

    def bind(self, args: Sequence[Any], owned: Callable[[], Collection[int]]) -> bool:
        """Select the steps for the parameters in ``args``; return whether they have replaced others.

        A module or a parameter may have been replaced, which no guard of a capture checks.
        owned: returns the tensors that the optimizer has, by id.
        """
        numbers = self._take_weights(args, owned()) if self.numbers is None else self.numbers
        for n, bound in enumerate(self.bounds):
            if all(map(is_, map(args.__getitem__, numbers), bound.parameters)):
                if n:
                    self.bounds.insert(0, self.bounds.pop(n))
                return False
        self.bounds.insert(0, Bound(tuple(args[i] for i in numbers)))
        return len(self.bounds) > 1

    def _take_weights(self, args: Sequence[Any], owned: Collection[int]) -> tuple[int, ...]:
        """Return the indices of inputs that are weights; turn their casts into inputs."""
        parameters = {i for i, a in enumerate(args) if isinstance(a, torch.nn.Parameter)}
        self.numbers = tuple(i for i, a in enumerate(args) if i in parameters or id(a) in owned)
        self.hoisted = hoist_weight_casts(self.rewritten.gm, parameters) if self.hoists else []
        outline_checkpoints(self.rewritten.gm, traced=True)
        return self.numbers


def _lookups(gm: GraphModule) -> Iterator[tuple[int, Node, Mapping[str, Any]]]:
    """Yield the calls of embeddings that read an input, with its number before them and their arguments behind."""
    inputs = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for function in EMBEDDINGS:
        for node in gm.graph.find_nodes(op="call_function", target=function):
            given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
            if given["weight"] in inputs:
                yield inputs[given["weight"]], node, given


def free_tables(gm: GraphModule) -> dict[int, torch.dtype]:
    """Return the inputs that lookups of a planned graph read, with its low dtype, unless a rule keeps a lookup fp32."""
    planned = LOW_DTYPE in gm.meta and LEFT_ALONE not in gm.meta
    every = _lookups(gm) if planned else ()
    read = [(i, node.meta.get(MARK)) for i, node, given in every if is_eligible(captured(given["weight"]))]
    kept = {i for i, mark in read if mark is None or mark.cls is not OpClass.FOLLOW}
    return {i: gm.meta[LOW_DTYPE] for i, _ in read if i not in kept}


def names_of(gm: GraphModule) -> list[str]:
    """Return the names of a captured graph's inputs."""
    return [n.meta.get(INPUT, n.name) for n in gm.graph.nodes if n.op == "placeholder"]


def takes_symbols(gm: GraphModule) -> bool:
    """Return whether a captured graph has symbolic sizes or numbers."""
    given = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    sizes = [size for one in given for size in (one.shape if isinstance(one, Tensor) else (one,))]
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)
