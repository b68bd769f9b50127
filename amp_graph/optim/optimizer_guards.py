"""Guards on an optimizer's options and state, which a step's graph contains.

Before: after ``optimizer.state.clear()`` or a loaded checkpoint, a graph still has the old moments as its inputs.
After: the next step is traced again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_graph.errors import warn
from amp_graph.optim.check_optimizer import refuse_hooks, refuse_state_of_another_model
from amp_graph.optim.torch_fused_update import GroupUpdate, why_not_fused
from amp_graph.passes.torch_compat.optimizers import steps_otherwise

RATES = frozenset(("lr", "initial_lr"))  # set by schedules before each step; graphs read them as tensors
NOT_IN_GRAPHS = RATES | {"params"}
RESTLESS = 4  # consecutive steps with changed options: a schedule changes them


class WatchedOptimizer:
    """An optimizer whose options and state are part of graphs; ``forget``, weakly referenced, drops the graphs.

    ``why_outside``: why its ``step()`` is called after the graph, or "" if the update is part of the graph.
    """

    def __init__(self, optimizer: Optimizer, forget: Callable[[], None]) -> None:
        """Record the options, and drop graphs at each load of state; a load with wrong shapes is refused.

        Each ``step()`` by others is shown by version counters. The optimizer's hooks go when this object does.
        """
        self.optimizer = optimizer
        self.why_outside = why_not_fused(optimizer)
        self._options = self._read_options()
        self._changes = 0  # consecutive calls with changed options
        hooks = [*_forget_when_loaded(optimizer, weakref.WeakMethod(forget))]
        hooks.append(optimizer.register_step_post_hook(show_update))
        weakref.finalize(self, _remove, hooks).atexit = False

    def has_changed(self) -> bool:
        """Return whether options changed since the last call; reset the flag.

        Raises CaptureError if parameters have new hooks.
        """
        refuse_hooks(self.optimizer)
        before, self._options = self._options, self._read_options()
        if before == self._options:
            self._changes = 0
            return False
        # It is decided again where the update runs.
        pairs = zip(before[1:], self._options[1:], strict=False)
        names = sorted({name for old, new in pairs for name in new[0] if old[0].get(name) != new[0][name]})
        self._changes = self._changes + 1 if names else 0  # changed parameters need a new trace in any case
        if not self.why_outside and self._changes >= RESTLESS:
            self.why_outside = f"{SCHEDULED}{', '.join(names)}"
            warn(
                f"TrainStep: {', '.join(names)} of {type(self.optimizer).__name__} changed before each of {RESTLESS} "
                "consecutive steps, and each was traced again: from now on optimizer.step() is called after the graph\n"
                "  fix:   none needed; to keep the update in the graph, keep these options constant: "
                "cycle_momentum=False for OneCycleLR and CyclicLR. Learning rates may change at any step",
            )
        elif not self.why_outside.startswith(SCHEDULED):
            self.why_outside = why_not_fused(self.optimizer)
        self._options = self._read_options()
        return True

    def owned(self) -> set[int]:
        """Return the optimizer's parameters, by id."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def has_state_of(self, updates: Sequence[GroupUpdate]) -> bool:
        """Return whether the optimizer still has the state that ``updates`` read; a new layout replaces it."""
        return all(
            all(map(is_, map(self.optimizer.state.get(p, {}).get, update.names), values))
            for update in updates
            for p, *values in zip(update.params, *update.states, strict=True)
        )

    # -- options --------------------------------------------------------------------------------------

    def _read_options(self) -> list[Any]:
        """Return the parts of the optimizer in graphs: its options, its updated parameters, and their groups.

        All options except learning rates, which are read from the groups; none if it is called after the graph.
        """
        found: list[Any] = [steps_otherwise(self.optimizer)]
        for group in self.optimizer.param_groups:
            inside = {} if self.why_outside else {k: _mark(v) for k, v in group.items() if k not in NOT_IN_GRAPHS}
            found.append((inside, [*map(id, group["params"])], id(group)))
        return found


SCHEDULED = "options that change from step to step: "


def _mark(option: Any) -> Any:
    """Return a value that changes with ``option``: tensors can be written and do not compare."""
    if isinstance(option, Tensor):
        return id(option), option._version
    return tuple(map(_mark, option)) if isinstance(option, (tuple, list)) else option


def show_update(optimizer: Optimizer, *_: Any) -> None:
    """Let version counters show an update of all parameters, which fused kernels do not count, but of low ones.

    Those have masters, which are written back.
    """
    trained = (p for group in optimizer.param_groups for p in group["params"])
    increment_version([p for p in trained if p.requires_grad and p.itemsize > 2])


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _forget_when_loaded(
    optimizer: Optimizer, forget: weakref.WeakMethod[Callable[[], None]]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Call ``forget``, if it is still alive, after a matching state was loaded into the optimizer; return the hooks."""

    def before(optimizer: Optimizer, given: dict[str, Any]) -> None:
        if forget() is not None:
            refuse_state_of_another_model("TrainStep", optimizer, given)

    def after(_: Optimizer) -> None:
        if (alive := forget()) is not None:
            alive()

    return optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after)
