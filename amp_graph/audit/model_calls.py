"""AMP105: models that are called outside of the autocast region that covers their sisters.

Before: generator and discriminator in one loop, and ``discriminator(real)`` a line below the ``with`` block. After: a
finding at that line, as the generator's products run in bf16 and these in fp32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.audit.autocast_regions import class_of
from amp_graph.audit.codes import finding
from amp_graph.audit.records import LOW, Call, Event, Finding, Place, Watcher
from amp_graph.lists import OpClass


@dataclass
class Called:
    """The calls of one model at one place, in looked-at steps.

    ``trains``: it has parameters that train, and gradients are recorded. ``raised``: an input was cast to fp32 by the
    user. ``low``: products in low precision; ``full``: products in fp32 outside of all regions.
    """

    model: int  # its id
    kind: str
    place: Place
    trains: bool
    calls: int = 0
    raised: bool = False
    low: int = 0
    full: Counter[Call] = field(default_factory=Counter)


@dataclass(eq=False)
class ModelCalls(Watcher):
    """Compares the calls of models with each other: some are in regions, some are not."""

    _called: dict[tuple[int, Place, bool], Called] = field(default_factory=dict)
    _running: Called | None = None

    def take_call(self, event: Event, *, is_raised: bool) -> None:
        """Take the call of an outermost module; ``is_raised``: the user has cast an input to fp32."""
        if event.is_after:
            self._running = None
            return
        model, place = event.arguments["self"], event.place
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        self._running = self._called.setdefault(
            (id(model), place, trains), Called(id(model), type(model).__name__, place, trains)
        )
        self._running.calls += 1
        self._running.raised |= is_raised

    def ran(self, call: Call, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count a product of the model that runs."""
        if self._running is not None and call.phase == "forward" and class_of(operator) is OpClass.ALLOW:
            self._running.low += call.output in LOW
            if call.output == "float32" and not self.training.open:
                self._running.full[call] += 1

    # -- findings -------------------------------------------------------------------------------------

    def outside(self) -> list[Called]:
        """Return the calls in full precision, where others run low."""
        return [called for called in self._called.values() if self._sisters() and called.full and not called.low]

    def finding_of(self, called: Called, gain: str, *, is_large: bool) -> Finding:
        """Return AMP105 of such calls; ``gain``: what low precision would save, and whether that ``is_large``."""
        sisters, count = sorted({str(one.place) for one in self._sisters()}), called.full.total()
        # Full precision was meant, or costs little: gradient penalties, evaluation, frozen models, x.float().
        is_low = any(one.model == called.model for one in self._sisters())
        is_meant = is_low or not called.trains or called.raised
        return finding(
            "AMP105", called.place,
            f"{called.kind} was called {called.calls} time{'s' * (called.calls > 1)} outside of autocast"
            f"{'' if called.trains else ', without gradients of its own'}: "
            f"{count} products and convolutions ran in fp32, while those called at "
            f"{', '.join(sisters)} run in low precision{gain}",
            "call it inside of the same autocast region", level="note" if is_meant and not is_large else "",
            model=called.kind, calls=called.calls, products=count, sisters=sisters,
        )  # fmt: skip

    def _sisters(self) -> list[Called]:
        return [called for called in self._called.values() if called.low and called.trains]
