"""What a step's graph holds of an optimizer, and how it is noticed that this is no longer what the optimizer has.

Before: ``optimizer.state.clear()``, or a checkpoint loaded, under a graph that has the old moments as its inputs.
After: the next step is traced anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_graph.check_optimizer import refuse_hooks, refuse_state_of_another_model
from amp_graph.fused_update import GroupUpdate

NOT_IN_GRAPHS = frozenset(("lr", "params", "initial_lr"))


@dataclass(frozen=True)
class StateMark:
    """What shows that an optimizer has the state that a graph reads: how many entries there were, and the first.

    All of them would take longer to look at than some steps do; single ones are hardly replaced but by loading.
    """

    count: int
    parameter: Tensor
    name: str
    value: Tensor

    def is_of(self, optimizer: Optimizer) -> bool:
        """Say whether ``optimizer`` has it: not after ``optimizer.state.clear()``."""
        state = optimizer.state
        return len(state) >= self.count and state.get(self.parameter, {}).get(self.name) is self.value


class WatchedOptimizer:
    """An optimizer whose options and state are part of graphs; ``forget``, which it keeps weakly, drops them."""

    def __init__(self, optimizer: Optimizer, forget: Callable[[], None]) -> None:
        """Take note of the options, and have every load forget the graphs; only state that fits is loaded."""
        self.optimizer = optimizer
        self._options = _options(optimizer)
        self._mark: StateMark | None = None
        _forget_when_loaded(optimizer, weakref.WeakMethod(forget))

    def has_changed(self) -> bool:
        """Say, once, whether options are others than at the last call, or the state is another than was read.

        Raises CaptureError for parameters that have got hooks meanwhile, too.
        """
        refuse_hooks(self.optimizer)
        now = _options(self.optimizer)
        is_same = now == self._options and (self._mark is None or self._mark.is_of(self.optimizer))
        self._options = now
        return not is_same

    def was_read_by(self, updates: Sequence[GroupUpdate]) -> None:
        """Take note of the state that graphs read now; of none, where there are no ``updates``."""
        first = [(u.params[0], u.state_names()[0], u.states[0][0]) for u in updates if u.states]
        self._mark = StateMark(len(self.optimizer.state), *first[0]) if first else None

    def has_state_of(self, updates: Sequence[GroupUpdate]) -> bool:
        """Say whether the optimizer has all the state that ``updates`` read: it is made anew in another layout."""
        return all(
            self.optimizer.state.get(p, {}).get(name) is state
            for update in updates
            for name, states in zip(update.state_names(), update.states, strict=True)
            for p, state in zip(update.params, states, strict=True)
        )


def _options(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[int]]]:
    """Return what of the optimizer is part of a step's graph: all options but learning rates, and who is updated."""
    return [
        ({k: v for k, v in group.items() if k not in NOT_IN_GRAPHS}, [*map(id, group["params"])])
        for group in optimizer.param_groups
    ]


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
