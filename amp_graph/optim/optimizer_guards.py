"""What a step's graph holds of an optimizer, and how it is noticed that this is no longer what the optimizer has.

Before: ``optimizer.state.clear()``, or a checkpoint loaded, under a graph that has the old moments as its inputs.
After: the next step is traced anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from operator import is_
from types import NoneType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import warn
from amp_graph.optim.check_optimizer import refuse_hooks, refuse_state_of_another_model
from amp_graph.optim.torch_fused_update import GroupUpdate, why_not_fused
from amp_graph.passes.torch_compat.optimizers import steps_otherwise

RATES = frozenset(("lr", "initial_lr"))  # which schedules set anew before each step, and graphs read as tensors
NOT_IN_GRAPHS = RATES | {"params"}
RESTLESS = 4  # steps in a row that begin with other options than the one before: a schedule, not a decision

State = tuple[Tensor, tuple[tuple[str, Tensor], ...]]  # of a parameter: what graphs read, by name


class Objects:
    """The very objects that an optimizer had where nothing had changed: compared in half the time of their values."""

    def __init__(self, optimizer: Optimizer, stateful: Sequence[Tensor]) -> None:
        """Keep them; ``stateful`` are the parameters whose state graphs read."""
        groups = optimizer.param_groups
        self.otherwise, self.groups, self.stateful = steps_otherwise(optimizer), groups, stateful
        self.states = [optimizer.state[p] for p in stateful]
        self.lists = [(held, [*held]) for held in (groups, *(group["params"] for group in groups))]
        self.dicts = [(held, len(held), _without_rates(held)) for held in (*groups, *self.states)]

    @classmethod
    def of(cls, optimizer: Optimizer, stateful: Sequence[Tensor]) -> Objects | None:
        """Return them, or None where an option may become another while it stays the same object."""
        groups = optimizer.param_groups
        fixed = all(_is_fixed(value) for group in groups for k, value in group.items() if k not in NOT_IN_GRAPHS)
        return cls(optimizer, stateful) if fixed and all(p in optimizer.state for p in stateful) else None

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Say whether ``optimizer`` has these objects still, whatever its learning rates are."""
        if optimizer.param_groups is not self.groups or steps_otherwise(optimizer) != self.otherwise:
            return False
        for objects, known in self.lists:
            if len(objects) != len(known) or not all(map(is_, objects, known)):
                return False
        for items, size, seen in self.dicts:
            if len(items) != size or not all(map(is_, map(items.get, seen), seen.values())):
                return False
        return all(map(is_, map(optimizer.state.get, self.stateful), self.states))


class WatchedOptimizer:
    """An optimizer whose options and state are part of graphs; ``forget``, which it keeps weakly, drops them.

    ``why_outside``: why its ``step()`` is called behind the graph, or "" where the update is part of it.
    """

    def __init__(self, optimizer: Optimizer, forget: Callable[[], None]) -> None:
        """Take note of the options, and have every load forget the graphs; only state that fits is loaded."""
        self.optimizer = optimizer
        self.why_outside = why_not_fused(optimizer)
        self._options = self._read_options()
        self._changes = 0  # calls in a row before which options changed
        self._read: dict[int, State] = {}
        self._objects: Objects | None = None
        _forget_when_loaded(optimizer, weakref.WeakMethod(forget))

    def has_changed(self) -> bool:
        """Say, once, whether options are others than at the last call, or the state is another than was read.

        Raises CaptureError for parameters that have got hooks meanwhile, too.
        """
        refuse_hooks(self.optimizer)
        if self._objects is not None and self._objects.are_those_of(self.optimizer):
            self._changes = 0
            return False
        before, self._options = self._options, self._read_options()
        if same := before == self._options:
            self._changes = 0
        else:
            self._changed(before)
        same = same and self._has_all_that_was_read()
        self._objects = Objects.of(self.optimizer, [p for p, values in self._read.values() if values]) if same else None
        return not same

    def _changed(self, before: list[Any]) -> None:
        """Decide anew where the update is done."""
        pairs = zip(before[1:], self._options[1:], strict=False)
        names = sorted({name for old, new in pairs for name in new[0] if old[0].get(name) != new[0][name]})
        self._changes = self._changes + 1 if names else 0  # other parameters are to be traced anew wherever
        if not self.why_outside and self._changes >= RESTLESS:
            self._leave_graphs(names)
        elif not self.why_outside.startswith(SCHEDULED):
            self.why_outside = why_not_fused(self.optimizer)
        self._options = self._read_options()

    def _leave_graphs(self, names: Sequence[str]) -> None:
        self.why_outside = f"{SCHEDULED}{', '.join(names)}"
        warn(
            f"TrainStep: {', '.join(names)} of {type(self.optimizer).__name__} changed before each of {RESTLESS} steps "
            "in a row, each of which was traced anew: from now on optimizer.step() is called behind the graph\n"
            "  fix:   nothing, or leave them as they are: cycle_momentum=False for OneCycleLR and CyclicLR. Learning "
            "rates may change at any step",
        )

    def owned(self) -> set[int]:
        """Return the parameters that the optimizer has, by id."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    # -- state ----------------------------------------------------------------------------------------

    def was_read_by(self, updates: Sequence[GroupUpdate]) -> None:
        """Take note of the state that a graph reads."""
        self._objects = None
        self._read.update((id(p), (p, values)) for p, values in _states(updates))

    def forget_state(self) -> None:
        """Take note that no graph reads any."""
        self._objects = None
        self._read.clear()

    def has_state_of(self, updates: Sequence[GroupUpdate]) -> bool:
        """Say whether the optimizer has all the state that ``updates`` read: it is made anew in another layout."""
        return all(self._has(p, values) for p, values in _states(updates))

    def _has_all_that_was_read(self) -> bool:
        return all(self._has(p, values) for p, values in self._read.values())

    def _has(self, parameter: Tensor, values: tuple[tuple[str, Tensor], ...]) -> bool:
        now = self.optimizer.state.get(parameter)
        if now is None:
            return not values
        for name, value in values:
            if now.get(name) is not value:
                return False
        return True

    # -- options --------------------------------------------------------------------------------------

    def _read_options(self) -> list[Any]:
        """Return what of the optimizer is part of graphs: options, who is updated, and the groups that both are from.

        All options but learning rates, which are read from those groups; none of one that is called behind the graph.
        """
        found: list[Any] = [steps_otherwise(self.optimizer)]
        for group in self.optimizer.param_groups:
            inside = {} if self.why_outside else {k: _mark(v) for k, v in group.items() if k not in NOT_IN_GRAPHS}
            found.append((inside, [*map(id, group["params"])], id(group)))
        return found


SCHEDULED = "options that change from step to step: "


def _without_rates(held: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name not in RATES}


def _is_fixed(option: Any) -> bool:
    """Say whether ``option`` is what it is for good; tensors may be filled, lists changed."""
    return all(map(_is_fixed, option)) if isinstance(option, tuple) else isinstance(option, (NoneType, str, Real))


def _mark(option: Any) -> Any:
    """Return what is another where ``option`` is: tensors may be filled, and do not compare."""
    if isinstance(option, Tensor):
        return id(option), option._version
    return tuple(map(_mark, option)) if isinstance(option, (tuple, list)) else option


def _states(updates: Sequence[GroupUpdate]) -> Iterator[State]:
    for update in updates:
        names = update.state_names()
        for n, p in enumerate(update.params):
            yield p, tuple((name, values[n]) for name, values in zip(names, update.states, strict=True))


def load_hooks_of(optimizer: Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return where ``optimizer`` keeps the hooks of ``load_state_dict``, in which a step hangs its own."""
    return optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks


def _forget_when_loaded(optimizer: Optimizer, forget: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call ``forget``, while there is one, once the optimizer's state was replaced by a loaded one that fits."""

    def before(optimizer: Optimizer, given: dict[str, Any]) -> None:
        if forget() is not None:
            refuse_state_of_another_model("TrainStep", optimizer, given)

    def after(_: Optimizer) -> None:
        if (alive := forget()) is not None:
            alive()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
