"""Captures the calls of one model: each as one graph, or as graphs around code that Dynamo does not capture.

Before: ``forward(x)``. After: ``CaptureRunners.run(x)``, which runs the graph whose guards hold, or captures one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_graph.capture.capture_log import CaptureLog
from amp_graph.capture.captured_graphs import CapturedGraphs
from amp_graph.capture.dynamo_backend import Compile
from amp_graph.capture.graph_limits import GraphLimits
from amp_graph.passes.torch_compat.dynamo_capture import Runner, capture_with_dynamo
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find
from amp_graph.passes.torch_compat.dynamo_frames import has_compiled, own_code_object, weakly
from amp_graph.policy import Policy

OWN = "amp_graph_forward"  # the name of the function that is captured


@dataclass(eq=False)
class CaptureRunners:
    """What runs the calls of ``model``, whose forward is ``forward``; set by ``start``.

    ``find`` returns the compiled code whose guards hold for a call, without Dynamo; ``frames`` has that code, and is
    None where another compiler keeps it.
    """

    model: torch.nn.Module
    forward: Callable[..., Any]
    policy: Policy
    compile: Compile
    dynamic: bool | None
    captured: CapturedGraphs
    limits: GraphLimits
    log: CaptureLog

    def start(self) -> None:
        """Capture from the beginning: Dynamo forgets earlier captures, and frames that it gave up."""
        self.find: Find = _find_nothing
        self.frames: CompiledFrames | None = None
        self._code: types.CodeType | None = None
        self.run: Runner = self.forward if self.policy.level == "O0" else self._first

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first call, which knows the device of the model: it may have been moved since it was converted."""
        self.run = self._capturing()
        return self.run(*args, **kwargs)

    def has_captures(self) -> bool:
        """Say whether Dynamo has compiled code for some calls."""
        return self._code is not None and has_compiled(self._code)

    def _capturing(self) -> Runner:
        forward = self.forward

        def amp_graph_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        own = own_code_object(amp_graph_forward)  # type: ignore[arg-type]
        self._code = own.__code__
        if self.compile in ("eager", "inductor"):
            self.frames = CompiledFrames(own)
            self.find = self.frames.find
        self.limits.variants.forget()  # Dynamo dropped those
        eager = self.compile == "eager"
        return capture_with_dynamo(
            own,
            weakly(self.captured.take),
            dynamic=self.dynamic,
            fullgraph=False,
            heard=self.log,
            choice=self.limits.variants,
            collector_waits=eager,
            eager=eager,
        )


def _find_nothing(local: dict[str, Any]) -> None:
    """Find no compiled code, so that every call goes through Dynamo."""
