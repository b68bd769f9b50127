"""The graphs of one model: what captures its calls, the rewritten form of each graph, and the parameters that are read.

Before: ``forward(x)``. After: ``CapturedGraphs.run(x)``, which runs the graph whose guards hold, or captures one; a
``Captured`` in ``graphs`` for each.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.diagnostics import Place, break_at, warn_of_missing_kernels
from amp_graph.capture.dynamo_backend import Captured, lower
from amp_graph.capture.ladder import fast_path_of, on_ladder, rungs_below, with_fast_path
from amp_graph.capture.name_nodes import name_nodes
from amp_graph.capture.recapture_limits import Variants
from amp_graph.devices import device_of, device_of_model
from amp_graph.errors import ListError, PolicyError
from amp_graph.lists.errors import Attempt, first_line, warned_once
from amp_graph.passes.base import Pass
from amp_graph.passes.graph.meta_keys import LEFT_ALONE, PREDICTED
from amp_graph.passes.graph.node_info import source_line
from amp_graph.passes.manager import is_strict
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.passes.torch_compat.autograd import hook_gradients
from amp_graph.passes.torch_compat.dispatch import is_autocast_on
from amp_graph.passes.torch_compat.dynamo_capture import Runner, capture_with_dynamo, ends_in_break
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find, compiled_entries, own_code_object, weakly
from amp_graph.passes.torch_compat.dynamo_settings import parameters_as_inputs
from amp_graph.passes.weights.frozen_weights import FrozenWeights
from amp_graph.replay.recorder import RECORDERS
from amp_graph.replay.replays import Replays
from amp_graph.rewrite import Rewritten, copy_graph, rewrite_in_place

if TYPE_CHECKING:
    from amp_graph.capture.conversion import Conversion

OWN = "amp_graph_forward"  # the name of the function that is captured
AS_IT_IS = "a graph runs as captured, without a precision plan: the user's own torch.autocast around it decides"
COMPILED = "compiled code is not recorded; mode='reduce-overhead' has Inductor record it"


@dataclass(eq=False)
class CapturedGraphs:
    """The graphs of the model that is converted by ``of``, the code that Dynamo compiled of them, and its guards.

    ``find`` returns the compiled code whose guards hold for a call, without Dynamo; ``frames`` has that code, and is
    None where another compiler keeps it. ``run`` runs a call through Dynamo, which captures if no guard holds: into
    ``take``, a Dynamo backend.
    """

    of: Conversion
    variants: Variants
    graphs: list[Captured] = field(default_factory=list)
    runs: int = 0
    runs_left_alone: int = 0  # of graphs all in fp32, under a policy that leaves graphs so
    replays: Replays | None = None  # recordings of its graphs; None: nothing is recorded
    freezes: bool = False  # whether its graphs read frozen weights
    frozen: FrozenWeights | None = None  # those, from the first capture on
    taker: Callable[[GraphModule], Runner] | None = None  # returns what runs a graph, in place of its rewritten form
    notes_reads: bool = True  # until the end of a call that captured something: graphs serve several modules
    _read: set[int] = field(default_factory=set)  # parameters that a graph reads, by id

    def __post_init__(self) -> None:
        """Record nothing, or what the policy replays; nothing is captured yet."""
        if self.of.policy.replays:
            self.replays = Replays(self.of.model)

    def start(self) -> None:
        """Capture from the beginning: Dynamo forgets earlier captures, and frames that it gave up."""
        self.find: Find = lambda local: None  # nothing: every call goes through Dynamo
        self.frames: CompiledFrames | None = None
        self._code: types.CodeType | None = None
        self.run: Runner = self.of.wide if self.of.policy.level == "O0" else self._first

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first call, which knows the device of the model: it may have been moved since it was converted."""
        self.run = self._capturing()
        return self.run(*args, **kwargs)

    def start_again(self, runs: int) -> None:
        """Start anew if no graph ran since there were ``runs``: Dynamo skips a frame without code for good."""
        if self.runs == runs and self._code is not None and not compiled_entries(self._code):
            self.start()

    def _capturing(self) -> Runner:
        forward = self.of.wide  # by which name guards read it

        def amp_graph_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        own = own_code_object(amp_graph_forward)  # type: ignore[arg-type]
        self._code = own.__code__
        if self.of.compile in ("eager", "inductor"):
            self.frames = CompiledFrames(own)
            self.find = self.frames.find
        self.variants.captures.clear()  # Dynamo dropped those
        eager = self.of.compile == "eager"
        run = capture_with_dynamo(
            own,
            weakly(self.take),  # Dynamo may keep compiled code, and all that it references, longer than the model lives
            dynamic=self.of.dynamic,
            fullgraph=False,
            heard=self.of.diagnostics,
            choice=self.variants,
            collector_waits=eager,
            eager=eager,
        )

        return parameters_as_inputs(run) if eager else run  # so that their casts can be cached

    def take(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Rewrite and record one captured graph; return a callable that runs it and counts its runs."""
        if self.taker is not None:
            name_nodes(gm, self.of.model, self.of.forward)
            return self._counted(self.taker(gm))
        if is_autocast_on():
            where = next(filter(None, map(source_line, gm.graph.nodes)), "")
            self.of.diagnostics.skips.append(Place(where, AS_IT_IS))
            return self._counted(lower(gm, example_inputs, self.of.compile, self.of.policy, options=self.of.options))
        rungs = rungs_below(copy_graph(gm), self.of.policy, device_of(gm))
        rewritten: Rewritten | None = None
        with Attempt(ListError, PolicyError) as tried, warned_once(self.of.diagnostics.told):
            rewritten = self._rewritten(gm)
            self._record(rewritten, example_inputs)
            run = lower(gm, example_inputs, self.of.compile, rewritten.policy, options=self.of.options)
            rungs = [lambda: run, *rungs]
        if tried.error is not None:
            self._warn_of_failure(tried.error)
        call = on_ladder(rungs, weakly(self._warn_of_failure))
        if rewritten is None:
            return self._counted(call)
        if self.replays is not None and tried.error is None:
            call = self.replays.wrap(gm, call, run, "" if self.of.compile == "eager" else COMPILED)
        warn_of_missing_kernels()
        checked = rewritten.dtype == torch.float16 and self.graphs[-1].grad
        return self._counted(call, left_alone=_is_all_fp32(rewritten), checked=checked)

    def _rewritten(self, gm: GraphModule) -> Rewritten:
        name_nodes(gm, self.of.model, self.of.forward, self.of.whole)
        policy = self.of.policy
        if break_of(gm) is not None:  # Python between graphs expects fp32
            policy = replace(policy, keep_outputs=True)
        device, eager = device_of_model(self.of.model), self.of.compile == "eager"
        self.frozen = self.frozen or self._new_frozen(device)  # not earlier: an unpickled model has no parameters yet
        modes: dict[str, Any] = {"eager": eager, "frozen": self.frozen}
        last: list[Pass] = []
        if eager and self.of.policy.level != "O0" and not self._is_recorded(device):  # casts are recorded with the rest
            last = pipeline(Phase.CALLS, policy.pipeline_options(device or "cpu", user=self, **modes))
        if self.of.compile == "inductor" and device is None:
            last = pipeline(Phase.COMPILED, policy.pipeline_options("cpu", user=self))
        modes["inductor"] = self.of.options if self.of.compile == "inductor" else None
        strict = self.of.diagnostics.strict or None
        return rewrite_in_place(gm, policy, device, last, measured=self.of.measured, strict=strict, **modes)

    def _record(self, rewritten: Rewritten, inputs: Sequence[Any]) -> None:
        broken = break_of(rewritten.gm) or Place("", "")
        mode = self.of.model.training, torch.is_grad_enabled()
        self.graphs.append(Captured(rewritten, *mode, broken.reason, broken.where))
        if self.of.gathers is not None:
            self.of.gathers.learn(rewritten, inputs)
        self.notes_reads = True

    def _warn_of_failure(self, error: Exception) -> None:
        """Report that a graph runs as captured; raises ``error`` if strict."""
        if self.of.diagnostics.strict or is_strict():
            raise error
        self.of.reads_unseen()
        cause = f"{type(error).__name__}: {first_line(error)}"
        self.of.diagnostics.warn("a rewritten graph failed, and calls of it run as captured, without a plan", cause)

    def unread(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that no graph run has read, by name."""
        return {name: p for name, p in self.of.model.named_parameters() if id(p) not in self._read}

    def _counted(self, run: Runner, *, left_alone: bool = False, checked: bool = False) -> Runner:
        """Wrap ``run`` to count its runs, those of graphs left in fp32 (``left_alone``), and the parameters it reads.

        Its fast path counts nothing: the conversion, which calls it, does. ``checked``: a loss scale is looked for at
        its first backward.
        """
        first, owner = True, weakref.ref(self)

        def counted(*args: Any) -> Any:
            nonlocal first
            graphs = owner()
            if graphs is None:  # a captured function of the user may be called by another model
                return run(*args)
            first = checked and not graphs.of.diagnostics.scale_is_known
            if graphs.notes_reads:
                graphs._read |= {id(a) for a in args if isinstance(a, torch.nn.Parameter)}
            graphs.runs += 1
            graphs.runs_left_alone += left_alone
            results = run(*args)
            if first:
                hook_gradients(results, graphs.of.diagnostics.check_scale)
            return results

        return with_fast_path(counted, lambda: None if first or left_alone else fast_path_of(run))

    def _is_recorded(self, device: str | None) -> bool:
        return self.replays is not None and self.of.compile == "eager" and device in RECORDERS

    def _new_frozen(self, device: str | None) -> FrozenWeights | None:
        """Return what a frozen model keeps; None for one that is not, and where recordings read weights unseen."""
        if not self.freezes or self.of.policy.level == "O0" or self._is_recorded(device):
            return None
        made = FrozenWeights(self.of.model, self.of.policy.torch_dtype(device or "cpu"))
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
