"""Reports the code of a converted model that no graph captured, with its place and the fix.

Before: a call in which no graph ran. After: the warning "nothing was captured, so this call ran in fp32: ...".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_graph.capture.capture_fixes import fix_of, with_place
from amp_graph.capture.capture_log import CaptureLog
from amp_graph.capture.captured_graphs import CapturedGraphs
from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.recapture_reasons import called
from amp_graph.graph_breaks.escaped_code import EscapedCode
from amp_graph.passes.torch_compat.modules import is_sharded

NAMED = 3  # of the parameters that no graph reads


@dataclass(eq=False)
class MissedCode:
    """Reports what the captures of ``model``, whose forward is ``forward``, left out."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    captured: CapturedGraphs
    escaped: EscapedCode
    log: CaptureLog
    said: Complaints

    def report_call(self, how: str) -> None:
        """Report that no graph ran in a call, which ran ``how`` ("in fp32", "under torch.autocast(...)")."""
        causes = with_place(self._causes() or "no tensor operations", called(inspect.unwrap(self.forward)).where)
        self.said.complain(f"nothing was captured, so this call ran {how}", causes, fix=fix_of(causes))

    def report_parts(self) -> None:
        """Report the parameters that no captured graph has read, if a part of the forward was not captured."""
        self.log.events = 0
        unread = self.captured.unread()
        if unread:
            few = ", ".join(unread[:NAMED]) + (", ..." if len(unread) > NAMED else "")
            self.said.complain(
                f"only a part of the forward was captured: no graph reads {len(unread)} parameters ({few}); the "
                f"code that reads them ran {self.escaped.how}",
                self._causes(),
                warned=not self.escaped.is_cast,
            )

    def _causes(self) -> str:
        """Return in one line why capture was incomplete."""
        sharded = [name for name, part in self.model.named_modules() if name and is_sharded(part)]
        if sharded:
            return (
                f"the hooks of {len(sharded)} sharded modules ({sharded[0]}, ...) cannot be captured; convert each one "
                "before sharding it: fully_shard(amp_graph.convert(part))"
            )
        return self.log.causes()
