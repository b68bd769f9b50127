"""A frozen model: graphs of its own, which read weights that were cast, packed and folded once.

Before: ``model(x)`` runs ``Conversion.__call__``. After ``amp_graph.freeze(model)``: ``FrozenConversion.__call__``,
which refuses to record gradients, and names the weights that were written meanwhile.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from amp_graph.capture.conversion import Conversion
from amp_graph.errors import CaptureError, warn
from amp_graph.model_state import CONVERSION
from amp_graph.passes.calibration.node_keys import few


class FrozenConversion(Conversion):
    """The conversion of a frozen model; ``thawed``: its other one, whose graphs are kept."""

    def __init__(self, thawed: Conversion) -> None:
        """Prepare the same conversion for frozen weights; ``freeze`` puts it in place."""
        super().__init__(thawed.model, **thawed.settings())
        self.thawed = thawed
        self.captured.freezes = True
        self.attach()

    def put(self) -> None:
        """Let the model's calls run here."""
        self.model.__dict__.update({CONVERSION: self, "forward": self})

    def thaw(self) -> None:
        """Put the other conversion back, and free what was kept of the weights."""
        if self.captured.frozen is not None:
            self.captured.frozen.drop()
        self.model.__dict__.update({CONVERSION: self.thawed, "forward": self.thawed})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as ``Conversion`` does, without gradients; afterwards warn of weights that were written."""
        if torch.is_grad_enabled():
            raise CaptureError(
                f"{type(self.model).__name__} is frozen: it computes no gradients\n"
                "  legal: calls under torch.no_grad() or torch.inference_mode()\n"
                "  fix:   amp_graph.thaw(model) to train it; with amp_graph.frozen(model): for an evaluation in between"
            )
        result = super().__call__(*args, **kwargs)
        frozen = self.captured.frozen
        if frozen is not None and frozen.written:
            warn(
                f"amp_graph: weights of the frozen {type(self.model).__name__} were written or replaced: "
                f"{few([*dict.fromkeys(frozen.written)])}; this call reads them as they are now, and cast and packed "
                "them again\n"
                "  fix:   amp_graph.thaw(model) before weights change, amp_graph.freeze(model) afterwards"
            )
            frozen.written.clear()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenConversion:
        """Convert and freeze the copied model."""
        return FrozenConversion(copy.deepcopy(self.thawed, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the conversion to freeze."""
        return FrozenConversion, (self.thawed,)
