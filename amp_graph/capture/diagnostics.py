"""Reports calls that could not run as planned: by a note in the report, a warning, or (strict) an error.

Before: a call under a dispatch mode. After: "called under FlopCounterMode, ..." once as an AmpGraphWarning and a note.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from amp_graph.errors import CaptureError, warn
from amp_graph.passes.graph.meta_keys import LEFT_ALONE
from amp_graph.passes.precision.predict_time import WORTH_IT
from amp_graph.policy_words import word_of


def warn_of_full_precision(what: str, gm: GraphModule, dtype: torch.dtype) -> None:
    """Warn that ``gm``, a graph of ``what``, stays in fp32 because ``dtype`` is not profitable."""
    low, found = word_of(dtype), gm.meta[LEFT_ALONE]
    warn(
        f"amp_graph: {what} runs in fp32, as {low} is not profitable for this call: it is predicted "
        f"to take {found.ratio:.2f} times fp32's time on {found.machine}, and the limit is {WORTH_IT}\n"
        f"  fix:   policy '{low}' lowers it all the same",
    )


@dataclass
class Complaints:
    """Reports for ``model``; ``strict``: raises CaptureError."""

    model: torch.nn.Module
    strict: bool
    notes: list[str] = field(default_factory=list)

    def complain(self, what: str, causes: str = "", warned: bool = True, fix: str = "") -> None:
        """Report ``what`` once, with its causes; raises CaptureError if strict. ``warned``: not by a note alone."""
        told = f"{what}: {causes}" if causes else what
        text = f"amp_graph: {type(self.model).__name__}: {told}"
        if self.strict:
            raise CaptureError(text + "\n  fix:   see amp_graph.report(model); strict=False makes this a warning")
        if not any(note.startswith(what) for note in self.notes):  # the causes accumulate over calls
            self.note(told)
            if warned:
                warn(f"{text}\n  fix:   {fix}" if fix else text)

    def note(self, what: str) -> None:
        """Add a note to the report."""
        if what not in self.notes:
            self.notes.append(what)

    def left_alone(self, gm: GraphModule, dtype: torch.dtype) -> None:
        """Warn once that calls like that of ``gm`` run in fp32, which is predicted to be faster."""
        what = f"calls for which {word_of(dtype)} is not profitable run in fp32"
        if what not in self.notes:
            self.note(what)
            warn_of_full_precision(type(self.model).__name__, gm, dtype)
