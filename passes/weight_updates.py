"""When weights were last updated by what no version counter shows, for all in this process.

Before: a fused optimizer's step, after which ``weight._version`` is what it was. After: ``last_update()`` is another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_private import StorageWeakRef, on_every_optimizer_step, storage_key

MANY = 1024  # parameters: above, those that are gone are looked for


class Trained:
    """The storages of all parameters that an optimizer has updated; held weakly, so that no other gets one's key."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._room = MANY

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Take note of an update."""
        for p in parameters:
            key = storage_key(p)
            if key is not None and key not in self._known:
                self._known[key] = StorageWeakRef(p.untyped_storage())
        if len(self._known) > self._room:
            for key, storage in list(self._known.items()):  # in place, for another thread may add some
                if storage.expired():
                    self._known.pop(key, None)
            self._room = max(MANY, 2 * len(self._known))

    def __contains__(self, key: int | None) -> bool:
        """Say whether that of a storage is among them: ``storage_key``."""
        return key in self._known


class Updates:
    """When parameters were last updated by what no version counter shows: an object that is new each time."""

    mark: object = None
    trained = Trained()


class KnownUpdate:
    """The mark of an update of no parameters but those that are noted, ``after`` one of nobody knows which."""

    __slots__ = ("after",)

    def __init__(self, mark: object) -> None:
        self.after = _unknown(mark)


UPDATES = Updates()
SHOWN = object()  # in the place of a mark: the last update shows in the version counter, whoever else updates what


def weights_were_written(written: Iterable[Tensor] | None = None) -> None:
    """Make copies in this process old: all of them, unless it is said which parameters were ``written``.

    Fused optimizers, and those that write to ``.data``, leave version counters alone; so may what follows an
    update (an exponential average, clipping, masks). Each step of any optimizer therefore ends here, and is of all
    that is trained: copies of what is frozen beside it may outlive it (frozen_weights.py).
    """
    if written is None:
        UPDATES.mark = object()
    else:
        UPDATES.trained.add(written)
        UPDATES.mark = KnownUpdate(UPDATES.mark)


def outlives(weight: Tensor, mark: object, now: object) -> bool:
    """Say whether none of the updates from ``mark`` to ``now`` was of ``weight``, for no optimizer has stepped over it.

    What follows an update, as the average of another model's weights, may have written it none the less.
    """
    return storage_key(weight) not in UPDATES.trained and _unknown(mark) is _unknown(now)


def _unknown(mark: object) -> object:
    return mark.after if type(mark) is KnownUpdate else mark


def last_update() -> object:
    """Return an object that is another one after each update of any weights in this process."""
    hear_of_updates()
    return UPDATES.mark


def hear_of_updates() -> None:
    """Have every optimizer say when it stepped."""
    on_every_optimizer_step(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hear of a step. torch.compile traces this: there it may only assign."""
    if torch.compiler.is_compiling():
        weights_were_written()
    else:
        note_step(optimizer)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Make old what ``optimizer`` may have updated, and all else that is trained; what is frozen has no gradient.

    Of parameters elsewhere than in the CPU's memory there are no copies, and a step on a GPU waits for no look at them.
    """
    every = (p for group in optimizer.param_groups for p in group["params"])
    weights_were_written(p for p in every if p.is_cpu and (p.requires_grad or p.grad is not None))
