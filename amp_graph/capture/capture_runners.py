"""Captures the calls of one model: each as one graph, or as partial graphs around code that Dynamo does not capture.

Before: ``forward(x)``. After: ``CaptureRunners.run(x)``, which runs the graph whose guards hold, or captures one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.capture_log import CaptureLog
from amp_graph.capture.captured_graphs import CapturedGraphs, break_of
from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.dynamo_backend import Compile
from amp_graph.capture.graph_limits import GraphLimits
from amp_graph.capture.recapture_limits import Variants
from amp_graph.graph_breaks.escaped_code import EscapedCode
from amp_graph.graph_breaks.run_under_autocast import AsksDtypes, Escaping, InPieces, NotWhole, WholeOnly
from amp_graph.graph_breaks.sparse_operands import with_sparse_in_full
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, Runner, capture_with_dynamo
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find
from amp_graph.passes.torch_compat.dynamo_frames import own_code_object, weakly
from amp_graph.passes.torch_compat.fake import plain_forward
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
    escaped: EscapedCode
    limits: GraphLimits
    log: CaptureLog
    said: Complaints

    def start(self) -> None:
        """Capture from the beginning: Dynamo forgets earlier captures, and frames that it gave up."""
        self.find: Find = _find_nothing
        self.frames: CompiledFrames | None = None
        self._whole: WholeOnly | None = None
        self.escaped.look_again()
        self.run: Runner = self.forward if self.policy.level == "O0" else self._first

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first call, which knows the device of the model: it may have been moved since it was converted."""
        self.run = self._capturing()
        return self.run(*args, **kwargs)

    def start_after_error(self) -> None:
        """Capture again after a trace raised: Dynamo skips that frame for good. Captures of whole calls are kept."""
        if self._whole is None:
            self.start()
        else:
            self.run = self._escaping()

    def is_in_pieces(self) -> bool:
        """Return whether any call ran as partial graphs since the last start."""
        return isinstance(self.run, Escaping) and self.run.broken

    def _capturing(self) -> Runner:
        forward = self.forward

        def amp_graph_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        own = own_code_object(amp_graph_forward)  # type: ignore[arg-type]
        if self.compile in ("eager", "inductor"):
            self.frames = CompiledFrames(own)
            self.find = self.frames.find
        self.limits.whole.forget()  # Dynamo dropped those
        if not self.escaped.is_cast:
            return self._captured_by(own, self.captured.take, self.log, self.limits.whole)
        self._whole = WholeOnly(own.__code__)
        self._own = own
        self._as_whole = self._captured_by(own, self._take_whole, self._whole, self.limits.whole)
        return self._escaping()

    def _escaping(self) -> Escaping:
        """Return a runner that tries one graph per call, then partial graphs, none of which is captured yet."""
        assert self._whole is not None, "only called if uncaptured code runs under autocast"
        again = own_code_object(self._own)
        many = InPieces(again.__code__, self.log)
        self.limits.pieces.forget()
        pieces = self._captured_by(again, self.captured.take_piece, many, self.limits.pieces)
        pieces = with_sparse_in_full(pieces, self.forward, self.model, self._whole, self.log)
        whole = (self._as_whole, self._whole)
        own = (self.escaped.region, self.escaped.finished, self.escaped.attempt)
        return Escaping(whole, (pieces, many), *own, self.escaped.asks_dtypes, self.escaped.mode)

    def _captured_by(
        self, function: Any, backend: Callable[..., Runner], heard: CaptureListener, variants: Variants
    ) -> Runner:
        return capture_with_dynamo(
            function,
            weakly(backend),
            dynamic=self.dynamic,
            fullgraph=False,
            heard=heard,
            choice=variants,
            collector_waits=self.compile == "eager",
            eager=self.compile == "eager",
        )

    def _take_whole(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Take the graph of a whole call; stop the capture if it must be repeated under autocast."""
        assert self._whole is not None, "only the backend of whole-call captures"
        if break_of(gm) is not None:
            self._whole.stop(NotWhole)
            return plain_forward(gm)
        if self.policy.budget is not None:  # an error budget counts the roundings of its own plan
            return self.captured.take(gm, example_inputs)
        run = self.captured.take_whole(gm, example_inputs)
        if run is None:
            self._whole.stop(AsksDtypes)
            self.said.note(
                "its code branches on dtypes: it was captured under torch.autocast, so that it sees autocast's dtypes"
            )
        return run or plain_forward(gm)


def _find_nothing(local: dict[str, Any]) -> None:
    """Find no compiled code, so that every call goes through Dynamo."""
