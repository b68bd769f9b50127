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
from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.recapture_reasons import called
from amp_graph.passes.torch_compat.modules import is_sharded

NAMED = 3  # of the parameters that no graph reads


@dataclass(eq=False)
class MissedCode:
    """Reports what the captures of ``model``, whose forward is ``forward``, left out."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    log: CaptureLog
    said: Complaints

    def report_call(self, how: str) -> None:
        """Report that no graph ran in a call, and ``how`` further ones run."""
        causes = with_place(self._causes() or "no tensor operations", called(inspect.unwrap(self.forward)).where)
        then = "" if how == "in fp32" else f", and further ones run {how}"
        self.said.complain(f"nothing was captured, so this call ran in fp32{then}", causes, fix=fix_of(causes))

    def report_parts(self, unread: list[str], how: str, *, warned: bool) -> None:
        """Report the parameters that no captured graph has read; ``how`` further calls run, or "" for as this one."""
        few = ", ".join(unread[:NAMED]) + (", ..." if len(unread) > NAMED else "")
        then = f"further calls run without graphs, {how}" if how else "the code that reads them runs in fp32"
        self.said.complain(
            f"only a part of the forward was captured: no graph reads {len(unread)} parameters ({few}); {then}",
            self._causes(),
            warned=warned,
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
