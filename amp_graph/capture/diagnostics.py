"""What a converted model says of calls that went otherwise than planned: a note for the report, a warning, an error.

Before: a call under a dispatch mode. After: "called under FlopCounterMode, ..." once as an AmpGraphWarning and a note.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from amp_graph.errors import CaptureError, warn
from amp_graph.passes.graph.meta_keys import LEFT_ALONE
from amp_graph.passes.precision.predict_time import WORTH_IT
from amp_graph.policy import word_of


def warn_of_full_precision(model: torch.nn.Module, gm: GraphModule, dtype: torch.dtype) -> None:
    """Say that ``gm``, a graph of ``model``, is left in fp32, as ``dtype`` does not pay there."""
    low, found = word_of(dtype), gm.meta[LEFT_ALONE]
    warn(
        f"amp_graph: {type(model).__name__} runs in fp32 where {low} does not pay: a call like this one is predicted "
        f"to take {found.ratio:.2f} of fp32's time on {found.machine}, and up to {WORTH_IT} would pay\n"
        f"  fix:   policy '{low}' has it low all the same",
    )


@dataclass
class Complaints:
    """Speaks for ``model``; ``strict``: by CaptureErrors."""

    model: torch.nn.Module
    strict: bool
    notes: list[str] = field(default_factory=list)

    def complain(self, what: str, causes: str = "", warned: bool = True) -> None:
        """Say ``what``, once, and why; raises CaptureError where strict. ``warned``: by a warning, not a note alone."""
        told = f"{what}: {causes}" if causes else what
        text = f"amp_graph: {type(self.model).__name__}: {told}"
        if self.strict:
            raise CaptureError(text + "\n  fix:   see amp_graph.report(model); strict=False makes this a warning")
        if not any(note.startswith(what) for note in self.notes):  # the causes grow from call to call
            self.note(told)
            if warned:
                warn(text)

    def note(self, what: str) -> None:
        """Have it in the report."""
        if what not in self.notes:
            self.notes.append(what)

    def left_alone(self, gm: GraphModule, dtype: torch.dtype) -> None:
        """Warn, once, that calls such as that of ``gm`` run in fp32, which is predicted to take less time."""
        what = f"calls for which {word_of(dtype)} does not pay run in fp32, as they are written"
        if what not in self.notes:
            self.note(what)
            warn_of_full_precision(self.model, gm, dtype)
