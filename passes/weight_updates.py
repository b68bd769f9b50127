"""When weights were last updated by what no version counter shows, for all in this process.

Before: a fused optimizer's step, after which ``weight._version`` is what it was. After: ``last_update()`` is another.
"""

from __future__ import annotations

from typing import Any

from amp_graph.passes.torch_private import on_every_optimizer_step


class Updates:
    """When parameters were last updated by what no version counter shows: an object that is new each time."""

    mark: object = None


UPDATES = Updates()
SHOWN = object()  # in the place of a mark: the last update shows in the version counter, whoever else updates what


def weights_were_written() -> None:
    """Make every copy in this process old.

    Fused optimizers, and those that write to ``.data``, leave version counters alone; so may what follows an
    update (an exponential average, clipping, masks). Each step of any optimizer therefore ends here.
    """
    UPDATES.mark = object()


def last_update() -> object:
    """Return an object that is another one after each update of any weights in this process."""
    hear_of_updates()
    return UPDATES.mark


def hear_of_updates() -> None:
    """Have every optimizer say when it stepped."""
    on_every_optimizer_step(_after_step)


def _after_step(*_: Any) -> None:
    """Hear of a step. torch.compile traces this: it may only assign."""
    weights_were_written()
