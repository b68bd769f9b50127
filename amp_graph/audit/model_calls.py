"""AMP105: a model that is called outside of the autocast region that covers its sisters.

Before: generator and discriminator in one loop, and ``discriminator(real)`` a line below the ``with`` block. After: a
finding at that line, as the generator's products run in bf16 and these in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.audit.autocast_regions import class_of
from amp_graph.audit.codes import finding
from amp_graph.audit.records import CONVERSION, LOW, Call, Event, Finding, Place, Training, Watcher
from amp_graph.lists import OpClass


@dataclass
class Called:
    """The calls of one model at one place, in looked-at steps.

    ``trains``: it has parameters that train, and gradients are recorded. ``raised``: an input was cast to fp32 by the
    user. ``low``: products in low precision; ``full``: products in fp32 outside of all regions.
    """

    kind: str
    trains: bool
    calls: int = 0
    raised: bool = False
    low: int = 0
    full: int = 0


class ModelCalls(Watcher):
    """Compares the calls of models with each other: some are in regions, some are not."""

    def __init__(self, training: Training) -> None:
        """Begin."""
        super().__init__(training)
        self._called: dict[tuple[int, Place, bool], Called] = {}
        self._running: Called | None = None
        self._raised: dict[int, weakref.ref[Tensor]] = {}  # results of casts from low precision to fp32, by id

    def heard(self, event: Event) -> None:
        """Take the call of an outermost module."""
        if event.name != "model.call":
            return
        if event.is_after:
            self._running = None
            return
        model = event.arguments["self"]
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        self._running = self._called.setdefault((id(model), event.place, trains), Called(type(model).__name__, trains))
        self._running.calls += 1
        self._running.raised |= any(self._is_raised(t) for t in tree_leaves(event.arguments["args"]))

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count a product of the model that runs; outside of models, remember what the user cast."""
        if call.phase != "forward":
            return
        if self._running is None:
            if call.operator == CONVERSION and call.output == "float32" and set(call.inputs) & set(LOW):
                self._raised[id(result)] = weakref.ref(result)
        elif class_of(operator) is OpClass.ALLOW:
            self._running.low += call.output in LOW
            self._running.full += call.output == "float32" and not self.training.open

    def _is_raised(self, given: Any) -> bool:
        return isinstance(given, Tensor) and (known := self._raised.get(id(given))) is not None and known() is given

    def findings(self) -> Iterator[Finding]:
        """Yield the calls in full precision, where other calls of the training run low."""
        low = {model for (model, _, _), called in self._called.items() if called.low and called.trains}
        sisters = sorted({str(place) for (_, place, _), called in self._called.items() if called.low and called.trains})
        for (model, place, _), called in self._called.items():
            if not low or not called.full or called.low:
                continue
            # Full precision was meant, or costs little: gradient penalties, evaluation, frozen models, x.float().
            meant = model in low or not called.trains or called.raised
            how = "" if called.trains else ", without gradients of its own"
            yield finding(
                "AMP105", place,
                f"{called.kind} was called {called.calls} times outside of autocast{how}: {called.full} products and "
                f"convolutions ran in fp32, while those called at {', '.join(sisters)} run in low precision",
                "call it inside of the same autocast region",
                level="note" if meant else "", model=called.kind, calls=called.calls, products=called.full,
                sisters=sisters,
            )  # fmt: skip
