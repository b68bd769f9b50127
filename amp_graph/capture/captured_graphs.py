"""The graphs that Dynamo captured of one model: the rewritten form of each, and the parameters that its runs read.

Before: the GraphModule passed to a Dynamo backend. After: a ``Captured`` in ``graphs``, and a callable that runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.capture_log import CaptureLog, Place, break_at, first_line
from amp_graph.capture.diagnostics import Complaints
from amp_graph.capture.dynamo_backend import Compile, lower, with_sums_in_fp32
from amp_graph.capture.gradient_underflow import UnderflowWatch
from amp_graph.capture.missing_kernels import tell_of_missing_kernels
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.capture.precompile_kernels import compile_ahead
from amp_graph.capture.recapture_limits import Budget
from amp_graph.capture.run_as_captured import Rung, or_as_captured, rungs_below, settled, settling
from amp_graph.compiler_options import Options, records_itself
from amp_graph.devices import device_of, device_of_model
from amp_graph.errors import ListError, PolicyError
from amp_graph.passes.base import Pass
from amp_graph.passes.graph.fake_values import has_symbols
from amp_graph.passes.graph.meta_keys import LEFT_ALONE, PREDICTED
from amp_graph.passes.graph.node_info import source_line
from amp_graph.passes.manager import is_strict
from amp_graph.passes.pipeline import pipeline
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.precision.sensitivity import Measured
from amp_graph.passes.torch_compat.dispatch import is_autocast_on
from amp_graph.passes.torch_compat.dynamo_capture import Runner, ends_in_break
from amp_graph.passes.torch_compat.dynamo_frames import weakly
from amp_graph.passes.weights.frozen_weights import FrozenWeights
from amp_graph.policy import Policy
from amp_graph.replay.recorder import RECORDERS
from amp_graph.replay.replays import Replays
from amp_graph.rewrite import Rewritten, copy_graph, rewrite_in_place

INDUCTORS_OWN = "Inductor records it: the options have triton.cudagraphs, as mode='reduce-overhead' has"


@dataclass
class Captured:
    """One captured graph of a converted model: its rewritten form, and the graph break that ended it, if any."""

    rewritten: Rewritten
    training: bool | None
    grad: bool
    break_reason: str = ""
    break_line: str = ""


@dataclass(eq=False)
class CapturedGraphs:
    """Takes the graphs of ``model``, whose forward is ``forward``: a Dynamo backend is ``take``."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    policy: Policy
    compile: Compile
    measured: tuple[Measured, ...]
    log: CaptureLog
    said: Complaints
    options: Options = field(default_factory=dict)  # Inductor's
    graphs: list[Captured] = field(default_factory=list)
    runs: int = 0
    runs_left_alone: int = 0  # of graphs all in fp32, under a policy that leaves graphs so
    budget: Budget = field(default_factory=Budget)  # limits the number and size of captures
    replays: Replays | None = None  # recordings of its graphs; None: nothing is recorded
    freezes: bool = False  # whether its graphs read frozen weights
    frozen: FrozenWeights | None = None  # those, from the first capture on
    notes_reads: bool = True  # until the end of a call that captured something: graphs serve several modules
    _read: set[int] = field(default_factory=set)  # parameters that a graph reads, by id

    def __post_init__(self) -> None:
        """Set up the underflow check; nothing is captured yet."""
        self._underflow = UnderflowWatch(self.said)
        # Dynamo may keep compiled code, and all that it references, longer than the model lives.
        if self.policy.replays != "false":
            self.replays = Replays(self.model, self.policy.replays)

    def take(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Rewrite and record one captured graph; return a callable that runs it and counts its runs."""
        if is_autocast_on():
            return self._as_it_is(gm, example_inputs, "the user's own torch.autocast around it decides")
        rungs = rungs_below(copy_graph(gm), self.policy, device_of(gm))
        try:
            rewritten = self._rewritten(gm)
        except (ListError, PolicyError):
            raise
        except Exception as error:
            self._tell_of(error)
            return self._counted(or_as_captured(rungs[0], rungs[1:], weakly(self._tell_of), always=has_symbols(gm)))
        return self._recorded(rewritten, example_inputs, rungs)

    def _rewritten(self, gm: GraphModule) -> Rewritten:
        name_nodes(gm, self.model, self.forward)
        policy = self.policy
        if break_of(gm) is not None:  # Python between graphs expects fp32
            policy = replace(policy, keep_outputs=True)
        device, eager = device_of_model(self.model), self.compile == "eager"
        if eager and torch.is_grad_enabled():  # which are needed if the model was converted in eval mode
            compile_ahead(self.model, policy.torch_dtype("cpu"), trains=True)
        self.frozen = self.frozen or self._new_frozen(device)  # not earlier: an unpickled model has no parameters yet
        how: dict[str, Any] = {"eager": eager, "frozen": self.frozen}
        last: list[Pass] = []
        if eager and self.policy.level != "O0" and not self._is_recorded(device):  # casts are recorded with the rest
            last = pipeline(Phase.CALLS, policy.pipeline_options(device or "cpu", user=self, **how))
        if self.compile == "inductor" and device is None:
            last = pipeline(Phase.COMPILED, policy.pipeline_options("cpu", user=self))
        strict = self.said.strict or None
        how["inductor"] = self.options if self.compile == "inductor" else None
        return rewrite_in_place(gm, policy, device, last, measured=self.measured, strict=strict, **how)

    def _recorded(self, rewritten: Rewritten, example_inputs: Sequence[Any], rungs: Sequence[Rung]) -> Runner:
        record = Captured(rewritten, self.model.training, torch.is_grad_enabled())
        broken = break_of(rewritten.gm)
        if broken is not None:
            record.break_reason, record.break_line = broken.reason, broken.where
        self.graphs.append(record)
        self.notes_reads = True
        self.budget.nodes += len(rewritten.gm.graph.nodes)
        run = self._lowered(rewritten, example_inputs, rungs)
        if self.replays is not None:
            device = device_of(rewritten.gm)
            how = partial(with_sums_in_fp32, policy=rewritten.policy, device=device)
            why = INDUCTORS_OWN if records_itself(self.options) else ""
            run = self.replays.wrap(rewritten.gm, run, how, eager=self.compile == "eager", why=why)
        tell_of_missing_kernels()
        run = self._counted(run, _is_all_fp32(rewritten))
        return self._watched(run) if rewritten.dtype == torch.float16 and record.grad else run

    def _watched(self, run: Runner) -> Runner:
        """Wrap ``run`` to check its backward for gradients that underflow in fp16."""
        watch = weakref.ref(self._underflow)

        def watching(run: Runner) -> Runner:
            def watched(*args: Any) -> Any:
                results = run(*args)
                found = watch()
                if found is not None:
                    found.after(results)
                return results

            return watched

        return settling(watching(run), lambda: None if (found := settled(run)) is None else watching(found))

    def _lowered(self, rewritten: Rewritten, example_inputs: Sequence[Any], rungs: Sequence[Rung]) -> Runner:
        """Return a callable that runs a rewritten graph, and falls back to ``rungs`` if that fails."""
        always, tell = has_symbols(rewritten.gm), weakly(self._tell_of)
        try:
            run = lower(rewritten.gm, example_inputs, self.compile, rewritten.policy, options=self.options)
        except Exception as error:
            self._tell_of(error)
            return or_as_captured(rungs[0], rungs[1:], tell, always=always)
        return or_as_captured(lambda: run, rungs, tell, always=always)

    def _tell_of(self, error: Exception) -> None:
        """Report that a graph runs as captured; raises ``error`` if strict."""
        if self.said.strict or is_strict():
            raise error
        cause = f"{type(error).__name__}: {first_line(error)}"
        self.said.complain("a rewritten graph failed, and calls of it run as captured, without a plan", cause)

    def unread(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that no graph run has read, by name."""
        return {name: p for name, p in self.model.named_parameters() if id(p) not in self._read}

    def _as_it_is(self, gm: GraphModule, example_inputs: Sequence[Any], why: str) -> Runner:
        """Run a graph as captured, under the autocast state of its capture."""
        where = next(filter(None, map(source_line, gm.graph.nodes)), "")
        self.log.skips.append(Place(where, f"a graph runs as captured, without a precision plan: {why}"))
        return self._counted(lower(gm, example_inputs, self.compile, self.policy, options=self.options))

    def _counted(
        self,
        run: Runner,
        alone: bool = False,
    ) -> Runner:
        """Wrap ``run`` to count its runs, the runs of graphs left in fp32 (``alone``), and the parameters it reads.

        What it settles as counts nothing: the conversion, which calls it, does.
        """
        first, owner = True, weakref.ref(self)

        def counted(*args: Any) -> Any:
            nonlocal first
            counts = owner()
            if counts is not None:  # a captured function of the user may be called by another model
                first = False
                if counts.notes_reads:
                    counts._read |= {id(a) for a in args if isinstance(a, torch.nn.Parameter)}
                counts.runs += 1
                counts.runs_left_alone += alone
            return run(*args)

        return settling(counted, lambda: None if first or alone else settled(run))

    def _is_recorded(self, device: str | None) -> bool:
        return self.replays is not None and device in RECORDERS

    def _new_frozen(self, device: str | None) -> FrozenWeights | None:
        """Return what a frozen model keeps; None for one that is not, and where recordings read weights unseen."""
        if not self.freezes or self.policy.level == "O0" or self._is_recorded(device):
            return None
        made = FrozenWeights(self.model, self.policy.torch_dtype(device or "cpu"))
        weakref.finalize(self, made.drop).atexit = False
        return made


def _is_all_fp32(rewritten: Rewritten) -> bool:
    """Say whether a graph has nothing in low precision under a policy that leaves such calls in fp32."""
    found = rewritten.gm.meta.get(PREDICTED)
    is_full = found is None or not found.is_low or LEFT_ALONE in rewritten.gm.meta
    return rewritten.policy.leaves == "graphs" and is_full and all(map(_is_all_fp32, rewritten.bodies.values()))


def break_of(gm: GraphModule) -> Place | None:
    """Return the place and cause of the graph break that ends a captured graph; None if no break ends it."""
    reason = ends_in_break(gm)
    return None if reason is None else break_at(reason.reason, reason.user_stack)
