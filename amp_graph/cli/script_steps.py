"""Takes the model, its loss and the batches of the first steps out of an unmodified training script.

Before: ``loss = loss_fn(model(x), y)`` and ``loss.backward()`` in a script. After: a copy of the model, and for each
backward a ``Step``, which calls a model on that batch and returns that loss. What the script computes between the call
of its model and ``backward()`` is recorded, one function of torch after the other, and repeated from other outputs. A
step whose loss is another one when it is repeated is refused.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.audit import events
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.model_state import RandomState, same_random_numbers, unchanged
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.autograd import in_backward
from amp_graph.passes.torch_compat.dispatch import is_autocast_on
from amp_graph.policy import Policy
from amp_graph.run.call_site import Places
from amp_graph.run.eligibility import INNER_AUTOCAST, inner_of, why_left
from amp_graph.run.loss_scaling import listed
from amp_graph.run.script import StepsAreOver, Target, execute, raise_as_python_does, raised_by
from amp_graph.run.trained_models import hear

STEPS = 3  # backwards after which the script ends; the last two are used, as the first one may be unlike the others
SAME = 1e-3  # by which a loss may differ, relatively, when it is computed again
UNKNOWN = (
    "the loss depends on a tensor with a gradient that neither the model nor a function of torch made since: a custom "
    "autograd function, or an earlier step"
)
FIX = "amp-graph search model.py:build --batch batch.pt --loss losses.py:loss"


@dataclass(frozen=True)
class Made:
    """A tensor that an earlier call returned, by its identity then; or a parameter of the model, by its name."""

    key: int | str


@dataclass(frozen=True)
class Call:
    """A call of ``function``, or of a model, and under which modes it ran; ``keys``: identities of its results."""

    function: Any
    given: Any
    keys: list[int]
    gradients: bool
    autocast: tuple[str, torch.dtype, bool]


Step = Callable[..., Tensor]  # calls a model on the batch of one step of the script, and returns the loss


def _repeated(calls: Sequence[Call], roots: Any, model: Module, *, as_written: bool = False) -> Tensor:
    """Return the loss of a step for another model; ``as_written``: under the script's own autocast."""
    known: dict[Any, Any] = {Made(name): p for name, p in model.named_parameters()}

    def given(told: Any) -> Any:
        return tree_map(lambda one: known[one] if isinstance(one, Made) else one, told)

    for call in calls:
        args, kwargs = given(call.given)
        device, dtype, is_on = call.autocast
        region = torch.autocast(device, dtype, enabled=is_on) if as_written else contextlib.nullcontext()
        with torch.set_grad_enabled(call.gradients), region:
            result = (call.function or model)(*args, **kwargs)
        known.update(zip(map(Made, call.keys), tree_leaves(result), strict=False))
    return loss_of(given(roots))


def loss_of(roots: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Return the sum of what a backward starts from; of other than scalars, times the gradients that it is given."""
    return torch.stack([(root if seed is None else root * seed).sum() for root, seed in roots]).sum()


class FirstSteps(TorchFunctionMode):
    """Hears what a script calls, and keeps its first steps, with a copy of the model as it was before the last one.

    No error of it reaches the script; ``why`` has it.
    """

    def __init__(self, policy: Policy) -> None:
        """Hear nothing before it is entered, and told of calls."""
        super().__init__()
        self.policy = policy
        self.model: Module | None = None
        self.steps: list[Step] = []
        self.why = ""  # a step could not be taken
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget what was called before a backward."""
        self._calls: list[tuple[Call, Any]] = []  # each with what it returned, which holds the identities
        self._models: dict[int, tuple[Module, Module]] = {}  # that were called: each with its copy
        self._unscaled: dict[int, Tensor] = {}  # losses, by the identity of what a GradScaler made of them
        self._records = False

    # -- what the script calls ------------------------------------------------------------------------

    def before(self, module: Module) -> Module | None:
        """Copy a model that trains, as it is before its call; what calls without gradients return is a constant."""
        if torch.is_grad_enabled() and not any(p.requires_grad for p in module.parameters()):
            return None
        self._records, self._in_autocast = False, is_autocast_on()
        inner = inner_of(module)
        if torch.is_grad_enabled() and id(inner) not in self._models:
            if reason := why_left(module, self.policy):
                raise AmpGraphError(f"{type(inner).__name__} is {reason}")
            if not self._models:
                self._random = RandomState()
            stashed = [t for part in inner.modules() for t in _tensors(vars(part))]
            self._models[id(inner)] = inner, copy.deepcopy(inner, {id(t): t.detach() for t in stashed if not t.is_leaf})
        return inner

    def after(self, seen: Module, given: Any, result: Any) -> None:
        """Keep a call of a model that trains."""
        self._records = bool(self._models)
        if id(seen) in self._models and torch.is_grad_enabled():
            self._keep(seen, given, result)

    def under_autocast(self, seen: Module) -> None:
        """Refuse a model with regions of its own, which has no fp32 to compare with."""
        if id(seen) in self._models and not self._in_autocast:
            self.why = f"{type(seen).__name__} {INNER_AUTOCAST}, so that it never runs in fp32: switch that off"

    def failed(self, error: Exception) -> None:
        """Keep why a step cannot be taken."""
        self.why = self.why or (str(error) if isinstance(error, AmpGraphError) else f"{type(error).__name__}: {error}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and keep the call if a loss may come of it."""
        result = func(*args, **(kwargs or {}))
        if self._records and not is_compiling():
            if func is Tensor.__setitem__:
                self._keep(_with_item, (args, {}), args[0])
            elif _tensors(result):
                self._keep(func, (args, kwargs or {}), result)
        return result

    def _keep(self, function: Any, given: Any, result: Any) -> None:
        leaves = [one if isinstance(one, Tensor) else None for one in tree_leaves(result)]
        device = next((one.device.type for one in leaves if one is not None), "cpu")
        autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        call = Call(function, given, [0 if x is None else id(x) for x in leaves], torch.is_grad_enabled(), autocast)
        self._calls.append((call, result))

    def heard(self, name: str, arguments: Mapping[str, Any], caller: FrameType, is_after: bool, result: Any) -> None:
        """Take a step before its backward; end the script where it goes on after the last one, or would save."""
        if name == "scaler.scale" and is_after and isinstance(result, Tensor):
            self._unscaled[id(result)] = arguments["outputs"]
        elif name == "backward" and not is_after and not in_backward():
            self._records = False
            with Attempt() as tried:
                if not self.why:
                    self._take(listed(arguments["tensors"]), listed(arguments.get("grad_tensors")))
            if tried.error is not None:
                self.failed(tried.error)
                self.why = f"{Places().of(caller)}: {self.why}"
            self._begin_step()
        if name in ("backward", "save") and not is_after and (self.why or len(self.steps) >= STEPS):
            raise StepsAreOver

    # -- a step ---------------------------------------------------------------------------------------

    def _take(self, roots: list[Tensor], seeds: list[Tensor | None]) -> None:
        roots = [self._unscaled.get(id(root), root) for root in roots]
        seeds = seeds if len(seeds) == len(roots) else [None] * len(roots)
        needed, kept = {id(root) for root in roots}, list[Call]()
        for call, result in reversed(self._calls):
            if needed.intersection(call.keys):
                if not call.gradients and any(t.requires_grad and not t.is_leaf for t in _tensors(result)):
                    raise AmpGraphError(UNKNOWN)  # made in the forward of a function with a backward of its own
                kept.append(call)
                needed.update(map(id, _tensors(call.given)))
        models = {id(call.function): call.function for call in kept if id(call.function) in self._models}
        if len(models) != 1:
            names = " and ".join(type(one).__name__ for one in models.values())
            raise AmpGraphError(
                f"the loss comes of {len(models)} models, {names}; search takes one: let one module call them"
                if models else "backward() starts from no call of a model since the last backward(), and a step has one"
            )  # fmt: skip
        model, copied = self._models[next(iter(models))]
        losses = list(zip(roots, seeds, strict=True))
        step = _step_of(model, reversed(kept), losses)
        expected = float(loss_of(losses).detach())
        with same_random_numbers(), unchanged(copied):
            self._random.restore()
            again = float(step(copied, as_written=True).detach())
        if not abs(again - expected) <= SAME * max(abs(expected), SAME):
            raise AmpGraphError(
                f"the loss of a step is {expected:.6g}, and {again:.6g} when its functions are called again: it "
                "depends on more than the model's outputs, the batch, and the random numbers of the model"
            )
        self.model = copied
        self.steps.append(step)


def _step_of(model: Module, calls: Iterable[Call], losses: list[tuple[Tensor, Tensor | None]]) -> Step:
    """Return what repeats ``calls`` for another model than ``model``.

    What they were given becomes independent of the step: results by their keys, weights by names, the rest copied.
    """
    known: dict[int, Any] = {id(p): Made(name) for name, p in model.named_parameters()}

    def constant(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) not in known:
            if one.requires_grad and not one.is_leaf:
                raise AmpGraphError(UNKNOWN)
            is_weight = isinstance(one, torch.nn.Parameter)
            known[id(one)] = one if is_weight else one.detach().clone().requires_grad_(one.requires_grad)
        return known[id(one)]

    kept = []
    for call in calls:
        given = tree_map(constant, call.given)
        if call.autocast[2]:  # constants that autocast made low, as the state of an LSTM: the model runs in fp32, too
            given = tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.dtype in HALVES else t, given)
        known.update((key, Made(key)) for key in call.keys)
        kept.append(replace(call, function=None if call.function is model else call.function, given=given))
    return partial(_repeated, kept, [(constant(root), seed) for root, seed in losses])


def _tensors(given: Any) -> list[Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, Tensor)]


def _with_item(target: Tensor, place: Any, value: Any) -> Tensor:
    target[place] = value
    return target


def first_steps(target: Target, words: list[str], policy: Policy) -> FirstSteps:
    """Run a script until its third backward, and return its steps.

    Raises AmpGraphError where they cannot be taken, and what the script raises.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise AmpGraphError(
            "search: --script in one of several processes, whose steps wait for each other\n  legal: one process\n"
            f"  fix:   amp-graph search --script {target.name}"
        )
    found = FirstSteps(policy)
    with contextlib.ExitStack() as undo:
        undo.callback(events.hear(found.heard))
        undo.callback(hear(found.before, found.after, found.under_autocast, found.failed))
        undo.enter_context(found)
        failure = raised_by(lambda: execute(target, words))
    is_end = isinstance(failure, StepsAreOver) or (isinstance(failure, SystemExit) and failure.code in (None, 0))
    if failure is not None and not is_end:
        raise_as_python_does(failure)
    if found.why or not found.steps:
        raise AmpGraphError(
            f"search: {found.why or f'{target.name} ended, and no loss.backward() was seen'}\n"
            "  legal: a script that trains one model in this process, with loss.backward() for each of its calls\n"
            f"  fix:   {FIX}"
        )
    return found
