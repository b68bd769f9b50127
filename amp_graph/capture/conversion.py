"""The state of a converted model: captures its calls, keeps its graphs, and reports every call that is not captured.

``model(x)`` runs ``Conversion.__call__``, which runs the graph captured for ``x``, or captures one.

It replaces ``model.forward`` in the instance. So the model's hooks run as before, DDP and others that call ``forward``
call it, and so does an outer ``torch.compile``, which would otherwise silently trace the class's forward in fp32.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from amp_graph.capture.as_written import AsWritten, Mode, mode_of
from amp_graph.capture.captured_graphs import OWN, CapturedGraphs
from amp_graph.capture.diagnostics import Diagnostics, TwoDtypes, failed_at
from amp_graph.capture.dynamo_backend import Captured, Compile
from amp_graph.capture.low_gathers import Unit, follow
from amp_graph.capture.recapture_limits import FIX, MOST, NoGraph, Variants, argument_names
from amp_graph.capture.sharded_parts import multiplies, parts_between_units
from amp_graph.capture.unprofitable_calls import CallsLeftAlone
from amp_graph.compiler_options import Options
from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.lists.errors import Undo
from amp_graph.model_state import CONVERSION
from amp_graph.optim.master_weights import copy_masters, widened
from amp_graph.passes.graph.meta_keys import LEFT_ALONE, WIDENED
from amp_graph.passes.memory.gradient_buffers import POOL
from amp_graph.passes.precision.sensitivity import Measured
from amp_graph.passes.torch_compat.dispatch import (
    being_traced,
    has_modes,
    in_transform,
    innermost_transform,
    is_autocast_on,
    is_tracing,
    mode_without_capture,
)
from amp_graph.passes.torch_compat.dynamo_capture import dynamo_errors
from amp_graph.passes.torch_compat.dynamo_entries import (
    CALLS,
    FRAMES,
    Entry,
    dynamo_listens,
    outside_dynamo,
)
from amp_graph.passes.torch_compat.fake import refused_under_fx, wait_for_traces_of_others
from amp_graph.policy import Policy
from amp_graph.policy_words import HALVES, HELD_LOW

# They call the wrapped model; its forward is what is converted.
WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
TRIED_AGAIN = 8  # the call of a kind, of which one was without any graph, that is captured: the first set things up
_attached: weakref.WeakSet[Conversion] = weakref.WeakSet()  # of all converted models


class NoSource(CaptureError, AttributeError):
    """A converted model was asked for the source of its forward."""


@dataclass(eq=False)
class Conversion:
    """The options of one model's conversion, and every graph captured for it so far."""

    model: torch.nn.Module
    policy: Policy
    compile: Compile = "eager"
    dynamic: bool | None = None
    strict: bool = False
    # The instance's own ``forward`` before conversion (another library's wrapper), else None.
    wrapped: Callable[..., Any] | None = None
    measured: tuple[Measured, ...] = ()  # measured effects of rounding in its graphs, for error budgets
    max_graphs: int = MOST  # per code object
    options: Options = field(default_factory=dict)  # Inductor's
    narrows_to: dict[str, torch.dtype] = field(default_factory=dict)  # dtypes that widened parameters had, by name

    def __post_init__(self) -> None:
        """Read the model's forward; the model does not change before ``attach``."""
        self.forward = self.wrapped or types.MethodType(type(self.model).forward, self.model)
        # Captured, and run where capture fails. It sees low-precision parameters (O2, O3) as fp32.
        self.wide = widened(self.model, self.forward) if self.policy.level in HELD_LOW else self.forward
        functools.update_wrapper(self, self.forward, updated=())  # transformers' Trainer reads its signature
        self.diagnostics = Diagnostics(self.model, self.strict)
        self.plain = AsWritten(self)  # runs calls without graphs
        variants = Variants(OWN, self.max_graphs, self.dynamic is not False, names=argument_names(self.forward))
        self.captured = CapturedGraphs(self, variants)
        self._partial = set[Mode]()  # modes without graphs, or of graphs that leave out weights
        self._missed = dict[Mode, int]()  # calls since one had no graph, by mode
        self._ready: Entry | None = None  # looked at first, if the last call without it left nothing to report
        self._alone = CallsLeftAlone(self.model)  # calls that run uncaptured, as that is faster
        self.frozen: Any = None  # the conversion that runs while the model is frozen
        self.whole = self.model  # that contains the model, where this is the conversion of a part
        self.holder = self.model  # what fully_shard may have been applied to: the model, or what wraps it
        self.parts: list[Conversion] = []  # where fully_shard was applied to parts of the model: what is captured
        self.gathers: Unit | None = None  # where fully_shard gathers what the model alone reads
        self._was_called = False

    @property
    def graphs(self) -> list[Captured]:
        """The captured graphs, in order; those of parts behind the model's own."""
        return [*self.captured.graphs, *(graph for part in self.parts for graph in part.graphs)]

    @property
    def runs(self) -> int:
        """How many times a graph ran."""
        return self.captured.runs + sum(part.runs for part in self.parts)

    @property
    def escaped_runs(self) -> str:
        """How code without a graph runs; "" if there is no such code."""
        if self.parts:
            return self.plain.how
        return (self.plain.how if self._partial else "in fp32") if self.diagnostics.breaks else ""

    def _follow_shards(self) -> None:
        """Convert the parts of a model whose parts are units of ``fully_shard``; gather low what a part reads low."""
        if self.policy.level != "O1":
            return
        for module, holder in parts_between_units(self.model):
            part = Conversion(module, **{**self.settings(), "wrapped": module.__dict__.get("forward")})
            part.whole, part.holder = self.whole, holder
            part.diagnostics.notes, part.diagnostics.told = self.diagnostics.notes, self.diagnostics.told
            part.attach()
            self.parts.append(part)
        self.gathers = None if self.parts else follow(self, self.holder)
        if self.gathers is not None:
            own = frozenset(name for name, p in self.model.named_parameters() if p.dtype in HALVES)
            self.wide = widened(self.model, self.forward, own)

    def reads_unseen(self) -> None:
        """Note that code runs which no graph shows: what is gathered low may be read there in fp32."""
        if self.gathers is not None:
            self.gathers.read_as_written()

    def attach(self) -> None:
        """Replace the model's forward by this conversion."""
        self.captured.start()
        _attached.add(self)
        self.model.__dict__.update({CONVERSION: self, "forward": self})

    def detach(self) -> None:
        """Restore the model's own forward."""
        POOL.leave(self.captured)
        if self.captured.replays is not None:
            self.captured.replays.drop()
        _attached.discard(self)
        if self.gathers is not None:
            self.gathers.stop()
        for part in self.parts:
            part.detach()
        del self.model.__dict__[CONVERSION], self.model.__dict__["forward"]
        if self.wrapped is not None:
            self.model.__dict__["forward"] = self.wrapped

    def as_written(self) -> Callable[..., Any]:
        """Return the model's original forward, for another capture; refuses models with hooks."""
        if self.model._forward_hooks or self.model._forward_pre_hooks or self.model._backward_hooks:
            raise CaptureError(
                f"the hooks of {type(self.model).__name__} run around its conversion and would be lost in a capture\n"
                "  fix:   amp_graph.revert(model) first"
            )
        return self.wide

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured graph whose guards hold; capture one if there is none."""
        if dynamo_listens() is not None:
            return self._with_dynamo_off(*args, **kwargs)
        last = self._alone.last
        if last is not None and len(args) == 1 and not kwargs and type(one := args[0]) is Tensor and not one.is_nested:
            # The cheapest check first; the guard also covers autocast, tracing and modes.
            training, grad, is_like_it = last
            if is_grad_enabled() is grad and self.model.training is training and is_like_it(one):
                return self.wide(one)
        ready = self._ready
        if (
            ready is not None
            and (run := ready.fast_path) is not None
            and FRAMES._stance is ready.stance
            and not (is_autocast_on() or has_modes() or is_tracing() or innermost_transform())  # an export is a mode
            and ready.compiles_autograd() is not True
            and (guards := ready.guards()) is not None
            and guards.cache_entry is not None
        ):  # written out, as each call of a Python function takes 1 us of a small model's 20, with cold caches
            try:
                fits = ready.check({"args": args, "kwargs": kwargs, "forward": self.wide})
            except RuntimeError:  # of strided nested tensors: see below
                fits = ready.restore()
            if fits:
                CALLS.generation += 1
                self.captured.runs += 1
                return run(*args, **kwargs)
        if being_traced():
            raise self._not_to_be_traced()
        if is_autocast_on():
            if self.whole is self.model:  # else ours may be on, for the code between parts
                self.diagnostics.note("called under torch.autocast, which was disabled: the plan decides precision")
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self._call(args, kwargs)
        if self._alone.kinds and self._alone.has(args, kwargs):
            return self.wide(*args, **kwargs)
        return self._call(args, kwargs)

    _with_dynamo_off = outside_dynamo(__call__)

    def _not_to_be_traced(self, kind: type[CaptureError] = CaptureError) -> CaptureError:
        return kind(
            f"{type(self.model).__name__} is converted by amp_graph and cannot be traced or exported as it is\n"
            "  fix:   export amp_graph.revert(model), then amp_graph.rewrite(exported.module(), policy)"
        )

    @property
    def __globals__(self) -> Any:
        """Read by ``torch.jit.script``, which compiles the source of a forward: this one has none.

        The error is an AttributeError as well: torch.fx tracers test for the attribute, from any thread.
        """
        raise self._not_to_be_traced(NoSource)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._was_called:  # on every rank at once, whatever this one does then
            self._was_called = True
            self._follow_shards()
        if self.parts:
            return self._between_parts(args, kwargs)
        if in_transform():
            self.reads_unseen()
            self.diagnostics.warn("called inside a torch.func transform, which prevents capture: this call ran in fp32")
            return self.wide(*args, **kwargs)
        if has_modes() and self.policy.level != "O0" and (mode := mode_without_capture()):
            self.diagnostics.warn(
                f"called under {mode}, a dispatch mode that captured code does not support: it ran {self.plain.how}"
            )
            return self.plain.run(args, kwargs)
        captured, self._ready = self.captured, None
        before, alone = captured.runs, captured.runs_left_alone
        if (self._partial or self._missed) and self._has_no_graph(mode_of(self.model, args, kwargs)):
            return self.plain.run(args, kwargs)
        try:
            found = captured.find({"args": args, "kwargs": kwargs, "forward": self.wide})
        except RuntimeError as error:  # guards read strides; strided nested tensors have none
            self.diagnostics.warn(
                f"called with an input that Dynamo's guards cannot check: it ran {self.plain.how}",
                str(error).partition(". ")[0],
            )
            return self.plain.run(args, kwargs)
        try:
            unseen = nullcontext() if found or self.gathers is None else self.gathers.without_gradients()
            with Undo(lambda: captured.start_again(before)), unseen:
                result = (found or captured.run)(*args, **kwargs)
        except NoGraph as stopped:
            if stopped.owner is not captured.variants:
                raise
            self._warn_of_what_varies()
        except TwoDtypes as stopped:
            self._partial.add(mode_of(self.model, args, kwargs))
            self.plain.widens = True
            what = f"an operation has operands of two dtypes: such calls run without graphs, {self.plain.how}"
            self.diagnostics.warn(what, failed_at(stopped.__cause__), only_note=self.plain.region is not None)
        except dynamo_errors.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, AmpGraphError):
                raise error.inner_exception from None
            raise
        except RuntimeError as error:
            if not refused_under_fx(error):
                raise
            if captured.runs == before and wait_for_traces_of_others():
                return self._call(args, kwargs)
            raise self._not_to_be_traced() from error
        else:
            return self._ran(result, args, kwargs, before, alone)
        return self.plain.run(args, kwargs)

    def _between_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the code around parts: under the policy's autocast, once a call in fp32 has told the result's dtypes."""
        mode = mode_of(self.model, args, kwargs)
        if any(known == mode for known, _ in self.plain.dtypes):
            return self.plain.run(args, kwargs)
        result = self.wide(*args, **kwargs)
        self.plain.learn(mode, result)
        return result

    def _has_no_graph(self, mode: Mode) -> bool:
        """Say whether calls like this one run without graphs, as an earlier one has shown."""
        if mode in self._missed:
            self._missed[mode] += 1
            return self._missed[mode] != TRIED_AGAIN
        return mode in self._partial

    def _ran(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: int, alone: int) -> Any:
        """Return ``result`` after checking which graphs ran; ``before``, ``alone``: run counts before the call."""
        captured = self.captured
        if captured.variants.why:
            self._warn_of_what_varies()
        if captured.runs == before:
            self._nothing_ran(result, args, kwargs)
            captured.start_again(before)
            return result
        if self._missed:
            self._missed.pop(mode_of(self.model, args, kwargs), None)
        is_new = self.diagnostics.events > 0
        if is_new:
            self.reads_unseen()
            mode = mode_of(self.model, args, kwargs)
            self.plain.learn(mode, result)
            self._report_parts(mode)
        captured.notes_reads = False
        if self.policy.keep_ops:
            self.diagnostics.unkept(graph.rewritten for graph in self.graphs)
        if captured.runs_left_alone - alone == captured.runs - before:
            self._leave_alone(args, kwargs)
        elif not is_new and captured.frames is not None:
            self._ready = captured.frames.fast_path()  # nothing is left to report of calls like this one
        return result

    def _report_parts(self, mode: Mode) -> None:
        """Report what no graph reads; where it has weights, further calls run without graphs, under autocast."""
        self.diagnostics.events = 0
        # Where parameters are held low, graphs hand on fp32 copies of all of them.
        held_low = self.policy.level in HELD_LOW and self.diagnostics.breaks
        unread = dict(self.model.named_parameters()) if held_low else self.captured.unread()
        if not unread:
            return
        gains = multiplies(self.model, unread.values())
        plain = gains and self.compile == "eager" and self.plain.region is not None
        if plain:
            self._partial.add(mode)
        further = self.plain.how if plain else ""
        self.diagnostics.uncaptured_parts(list(unread), further, only_note=plain or not gains)

    def _leave_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run calls like this one uncaptured from now on, unless a compiler was asked for: its graphs are all fp32."""
        left = next((g.rewritten for g in reversed(self.graphs) if LEFT_ALONE in g.rewritten.gm.meta), None)
        if left is None:
            return
        if WIDENED not in left.gm.meta:  # else the code as written needs autocast
            if self.policy.level not in HELD_LOW and self.compile == "eager":  # a recomputing backward reads parameters
                self._alone.add(args, kwargs)
            if self.captured.frames is not None:
                self.captured.frames.forget_last()  # a graph of symbolic sizes must not take the calls of others
        self.diagnostics.left_alone(left.gm, left.dtype)

    def _warn_of_what_varies(self) -> None:
        """Report once that captures have stopped, and which value, constant in each graph, keeps changing."""
        variants = self.captured.variants
        without = f"calls without a graph run {self.plain.how}" if variants.whole else "code without one runs in fp32"
        self.diagnostics.warn(
            f"captured {variants.most} times, and calls still differ: {without} from now on",
            f"they differ in {variants.why}\n  fix:   {FIX}; max_graphs={variants.most} is how many graphs are kept",
        )

    def _nothing_ran(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.policy.level == "O0":  # the original forward runs
            return
        self.reads_unseen()
        if self.diagnostics.skips or self.diagnostics.breaks:  # else Dynamo was kept from this call
            mode = mode_of(self.model, args, kwargs)
            self.plain.learn(mode, result)
            self._missed.setdefault(mode, 1)
        self.diagnostics.uncaptured_call(self.forward, self.plain.how)

    @property
    def __code__(self) -> types.CodeType:
        """The code of the model's own forward: torch.export reads it before it calls."""
        return self.forward.__code__

    # -- copies ---------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        """Convert the copied model with the same options; it captures its own graphs."""
        copied = memo.get(id(self.model))
        if copied is None:
            raise CaptureError("a conversion cannot be copied without its model\n  fix:   copy.deepcopy(model)")
        copy_masters(self.model, memo)
        return restore(copied, {**self.settings(), "wrapped": copy.deepcopy(self.wrapped, memo)})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the model and the options; graphs are captured again."""
        return restore, (self.model, self.settings())

    def settings(self) -> dict[str, Any]:
        """Return what this conversion was made with, but for the model."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "model"}


def restore(model: torch.nn.Module, settings: dict[str, Any]) -> Conversion:
    """Attach a conversion to a copied or unpickled model, whose state may not be loaded yet."""
    made = Conversion(model, **settings)
    made.attach()
    return made


def whole_of(part: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    """Return the converted model that contains ``part``, and the path of ``part`` in it; None if there is none."""
    if _whole_of(part) is None:
        return None
    gc.collect()  # dropped models stay alive in reference cycles until then
    return _whole_of(part)


def _whole_of(part: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    for model in (found.model for found in _attached if conversion_of(found.model) is found):
        for path, module in model.named_modules():
            if module is part and path:
                return model, path
    return None


def conversion_of(model: Any) -> Conversion | None:
    """Return the conversion of ``model``, or None."""
    if isinstance(model, WRAPPERS):
        model = model.module
    found = getattr(model, "__dict__", {}).get(CONVERSION)
    return found if isinstance(found, Conversion) else None
