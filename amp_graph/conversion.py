"""A converted model's other half: captures its calls, keeps its graphs, and never falls silent.

``model(x)`` runs ``Conversion.__call__``, which runs the graph captured for ``x``, or captures one.

It stands where ``model.forward`` stood, in the instance: hooks of the model run around it as they always did, DDP
and whoever else calls ``forward`` finds it, and so does an outer ``torch.compile``, which would otherwise trace
the class's own forward, in fp32, without a word.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from amp_graph.backend import Compile, Runner, lower
from amp_graph.errors import AmpGraphError, AmpGraphWarning, CaptureError
from amp_graph.escape import Escaping, InPieces, WholeOnly, autocast_region, widened_outputs, without_autocast
from amp_graph.kept_modules import KeptModules, kept_in_fp32
from amp_graph.master_weights import copy_masters, widened
from amp_graph.name_nodes import name_nodes
from amp_graph.passes.base import PassError
from amp_graph.passes.facts import source_line
from amp_graph.passes.manager import is_verifying
from amp_graph.passes.measure_influence import Measured
from amp_graph.passes.pieces import PIECE, adopt_piece
from amp_graph.passes.torch_private import (
    Find,
    being_traced,
    capture_with_dynamo,
    compiled_frames,
    in_transform,
    is_sharded,
    mode_without_capture,
    outside_dynamo,
    own_code_object,
    plain_forward,
    weakly,
)
from amp_graph.passes.weight_copies import WeightCopies
from amp_graph.policy import HELD_LOW, Policy
from amp_graph.rewrite import Rewritten, copy_graph, passes_for_inductor, passes_of_copies, rewrite_in_place

TORCH = os.path.dirname(torch.__file__)
STDLIB = os.path.dirname(os.__file__)
HERE = os.path.dirname(__file__)
# They call the model inside, whose forward is what there is to convert.
WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
CONVERSION = "_amp_graph"  # the attribute that makes a model a converted one


@dataclass
class Captured:
    """One captured graph of a converted model: what it was rewritten to, and why it ended."""

    rewritten: Rewritten
    training: bool
    grad: bool
    break_reason: str = ""
    break_line: str = ""


@dataclass
class Piece:
    """A place in the user's code where capture stopped, or that was not captured at all."""

    where: str
    reason: str


@dataclass(eq=False)
class Conversion:
    """How one model is converted, and every graph captured for it so far."""

    model: torch.nn.Module
    policy: Policy
    compile: Compile = "eager"
    dynamic: bool | None = None
    strict: bool = False
    graphs: list[Captured] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    breaks: list[Piece] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: int = 0
    copies: WeightCopies | None = None  # of the parameters, in low precision; None: cast at each call
    # What the instance had as ``forward`` of its own (another library's wrapper), else None.
    wrapped: Callable[..., Any] | None = None
    measured: tuple[Measured, ...] = ()  # what roundings do in its graphs, for plans with an error budget

    def attach(self) -> None:
        """Put this conversion in the place of the model's forward."""
        self._forward = self.wrapped or types.MethodType(type(self.model).forward, self.model)
        # What is captured, and what runs where nothing was: low parameters (O2, O3) are seen as fp32 in it.
        self._wide = widened(self.model, self._forward) if self.policy.level in HELD_LOW else self._forward
        functools.update_wrapper(self, self._forward, updated=())  # transformers' Trainer reads its signature
        self.copies = None
        self._run = self._capturing()
        self._misses, self._events = 0, 0  # calls in which nothing ran; what Dynamo did not capture since the last look
        self._read: set[int] = set()  # parameters that a captured graph reads
        self.model.__dict__[CONVERSION] = self
        self.model.__dict__["forward"] = self

    def detach(self) -> None:
        """Give the model its own forward back."""
        del self.model.__dict__[CONVERSION], self.model.__dict__["forward"]
        if self.wrapped is not None:
            self.model.__dict__["forward"] = self.wrapped
        if self.copies is not None:
            self.copies.drop()

    def as_written(self) -> Callable[..., Any]:
        """Return the forward that the model was written with, for a capture of its own, with its hooks."""
        if self.model._forward_hooks or self.model._forward_pre_hooks or self.model._backward_hooks:
            raise CaptureError(
                f"the hooks of {type(self.model).__name__} run around its conversion and would be lost in a capture\n"
                "  fix:   amp_graph.revert(model) first"
            )
        return self._wide

    @outside_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on its captured graph; captures one where no guard set fits."""
        if being_traced():
            raise CaptureError(
                f"{type(self.model).__name__} is converted by amp_graph and cannot be traced or exported as it is\n"
                "  fix:   export amp_graph.revert(model), then amp_graph.rewrite(exported.module(), policy)"
            )
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self._note("called under torch.autocast, which was switched off: the plan decides precision")
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self._call(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_transform():
            self._complain("called inside a torch.func transform, where nothing can be captured: this call ran in fp32")
            return self._wide(*args, **kwargs)
        mode = mode_without_capture() if self.policy.level != "O0" else ""
        if mode:
            self._complain(
                f"called under {mode}, a dispatch mode, which captured code cannot run under: it ran {self._how()}"
            )
            return self._plainly(args, kwargs)
        before = self.runs
        try:
            found = self._find({"args": args, "kwargs": kwargs, "forward": self._wide})
            result = (found or self._run)(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, AmpGraphError):
                raise error.inner_exception from None
            raise
        except Exception:
            if self.runs == before:  # Dynamo skips what raised while it was traced, for good
                self._run = self._escaping() if self._whole is not None else self._capturing()
            raise
        if self.runs == before:
            self._nothing_ran()
        elif self._events:
            self._look_for_what_escaped()
        return result

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without any capture, as what escapes it."""
        if not self._casts_what_escapes():
            return self._wide(*args, **kwargs)
        with self._region():
            result = self._wide(*args, **kwargs)
        return self._finished(result, args, kwargs)

    def _look_for_what_escaped(self) -> None:
        """Say which parameters no captured graph has read, where some of the forward was not captured."""
        self._events = 0
        unread = [name for name, p in self.model.named_parameters() if id(p) not in self._read]
        if unread:
            few = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
            self._complain(
                f"only a part of the forward was captured: no graph reads {len(unread)} parameters ({few}), and the "
                f"code that does ran {self._how()}",
                self._causes(),
                warned=not self._casts_what_escapes(),
            )

    def _how(self) -> str:
        """Say how code that escapes capture runs."""
        if not self._casts_what_escapes():
            return "in fp32"
        kind, dtype = self._kind()
        return f"under torch.autocast({kind!r}, {dtype})"

    def _nothing_ran(self) -> None:
        if self.policy.level == "O0":  # whose forward is called as it is
            return
        how = self._how() if isinstance(self._run, Escaping) and self._run.broken else "in fp32"
        self._misses += 1
        if self._misses & (self._misses - 1) == 0:
            # Dynamo may have given the frame up for good, for a reason that is gone: try again, ever more rarely.
            self._run = self._capturing()
        self._complain(f"nothing was captured, so this call ran {how}", self._causes() or "no tensor operations")

    def _causes(self) -> str:
        """Return the last few places where capture stopped, each once, a line in all."""
        sharded = [name for name, part in self.model.named_modules() if name and is_sharded(part)]
        if sharded:
            return (
                f"the hooks of {len(sharded)} sharded parts ({sharded[0]}, ...) cannot be captured; convert each part "
                "before it is sharded: fully_shard(amp_graph.convert(part))"
            )
        found = dict.fromkeys(f"{s.where}: {_first_line(s.reason)}".strip(": ") for s in (*self.breaks, *self.pieces))
        return "; ".join(list(found)[-3:])

    def _complain(self, what: str, causes: str = "", warned: bool = True) -> None:
        told = f"{what}: {causes}" if causes else what
        text = f"amp_graph: {type(self.model).__name__}: {told}"
        if self.strict:
            raise CaptureError(text + "\n  fix:   see amp_graph.report(model); strict=False makes this a warning")
        if not any(note.startswith(what) for note in self.notes):  # the causes grow from call to call
            self._note(told)
            if warned:
                warnings.warn(text, AmpGraphWarning, stacklevel=4)

    def _note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    @property
    def __code__(self) -> types.CodeType:
        """The code of the model's own forward: torch.export reads it before it calls."""
        return self._forward.__code__

    # -- capture --------------------------------------------------------------------------------------

    def _capturing(self) -> Runner:
        self._find: Find = _find_nothing
        self._whole: WholeOnly | None = None
        self._kept: KeptModules | None = None
        if self.policy.level == "O0":
            return self._forward
        forward = self._wide

        def amp_graph_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        own = own_code_object(amp_graph_forward)  # type: ignore[arg-type]
        if self.compile in ("eager", "inductor"):
            self._find = compiled_frames(own)
        if not self._casts_what_escapes():
            return self._captured_by(own, self._backend, weakref.proxy(self))
        self._whole = WholeOnly(own.__code__)
        self._own, self._as_whole = own, self._captured_by(own, self._backend, self._whole)
        return self._escaping()

    def _escaping(self) -> Escaping:
        """Return what runs calls as what was captured whole, or else in pieces, of which none is captured yet."""
        assert self._whole is not None, "asked for where code that escapes runs under autocast"
        again = own_code_object(self._own)
        many = InPieces(again.__code__, weakref.proxy(self))
        pieces = self._captured_by(again, self._backend_of_piece, many)
        whole = (self._as_whole, self._whole)
        return Escaping(whole, (pieces, many), weakly(self._region), weakly(self._finished))

    def _captured_by(self, function: Any, backend: Any, heard: Any) -> Runner:
        return capture_with_dynamo(function, weakly(backend), dynamic=self.dynamic, fullgraph=False, heard=heard)

    # -- what escapes ---------------------------------------------------------------------------------

    def _casts_what_escapes(self) -> bool:
        """Say whether code that escapes capture runs under autocast."""
        return self.policy.runs_escaped == "autocast"

    @property
    def escaped_runs(self) -> str:
        """How code between graphs runs ("in fp32", "under torch.autocast(...)"), or "" where there is none."""
        in_pieces = isinstance(self._run, Escaping) and self._run.broken
        return self._how() if in_pieces or self.breaks else ""

    def _kind(self) -> tuple[str, torch.dtype]:
        """Return the device and the low precision for which autocast is switched on."""
        kind = device_of_model(self.model) or "cpu"
        return kind, self.policy.torch_dtype(kind)

    @contextmanager
    def _region(self) -> Iterator[tuple[str, torch.dtype]]:
        """Run what escapes as the policy wants it."""
        kind, dtype = self._kind()
        if self._kept is None:
            self._kept = KeptModules(kept_in_fp32(self.model, self.policy, kind), kind)
        with self._kept.standing(), autocast_region(kind, dtype):
            yield kind, dtype

    def _finished(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what the user sees its captured dtype: fp32, where it is no input, parameter or buffer."""
        if not self.policy.keep_outputs:
            return result

        def own() -> set[int]:
            return set(map(id, (*tree_leaves((args, kwargs)), *self.model.parameters(), *self.model.buffers())))

        return widened_outputs(result, self._kind()[1], own)

    def _backend_of_piece(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Rewrite one graph of a call in pieces, captured under autocast, unless the user's own region rules there."""
        kind, dtype = self._kind()
        if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != dtype:
            return self._as_it_is(gm, example_inputs, "the user's torch.autocast around it is obeyed")
        written = copy_graph(gm)
        with torch.autocast(kind, enabled=False):
            refusal = adopt_piece(gm, dtype)
            try:
                if not refusal:
                    return without_autocast(self._backend(gm, example_inputs), kind)
            except PassError as error:
                if is_verifying():
                    raise
                refusal = f"it could not be rewritten: {_first_line(error)}"
        return self._as_it_is(written, example_inputs, refusal)

    def _as_it_is(self, gm: GraphModule, example_inputs: Sequence[Any], why: str) -> Runner:
        """Run a graph as it was captured, under the autocast that it was captured under."""
        where = next(filter(None, map(source_line, gm.graph.nodes)), "")
        self.pieces.append(Piece(where, f"a graph that runs as it was captured, without a plan: {why}"))
        return self._counted(lower(gm, example_inputs, self.compile, self.policy))

    def _backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Rewrite one captured graph, record it, and return what runs it and counts the run."""
        name_nodes(gm, self.model, self._forward)
        reason: Any = getattr(gm, "compile_subgraph_reason", None)
        broken = reason is not None and bool(getattr(reason, "graph_break", False))
        policy = self.policy
        if broken and self._whole is not None and PIECE not in gm.meta:
            self._whole.breaks()  # and the graph will never run
            return plain_forward(gm)
        if broken:  # what a broken piece returns is read by the user's Python, which was captured in fp32
            policy = replace(policy, keep_outputs=True)
        self.copies = self.copies or self._new_copies()  # not before: an unpickled model has no parameters yet
        device, eager = device_of_model(self.model), self.compile == "eager"
        last = passes_of_copies(self.copies, policy, device or "cpu")
        if self.compile == "inductor" and device is None:
            last = passes_for_inductor(policy, self)
        rewritten = rewrite_in_place(gm, policy, device, last, eager=eager, measured=self.measured)
        record = Captured(rewritten, self.model.training, torch.is_grad_enabled())
        if broken:
            record.break_reason, record.break_line = _cause(reason.reason), _line_of(reason.user_stack)
        self.graphs.append(record)
        return self._counted(lower(gm, example_inputs, self.compile, policy))

    def _counted(self, run: Runner) -> Runner:
        """Return ``run``, counting its runs and the parameters that it reads."""
        first, owner = True, weakref.ref(self)

        def counted(*args: Any) -> Any:
            nonlocal first
            counts = owner()
            if counts is not None:  # a piece of the user's code may be called by another model
                if first:
                    first = False
                    counts._read |= {id(a) for a in args if isinstance(a, torch.nn.Parameter)}
                counts.runs += 1
            return run(*args)

        return counted

    def begins(self, code: types.CodeType) -> None:
        """Hear from Dynamo that a capture begins."""

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Hear from Dynamo that a capture ended, with a whole graph or not."""

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Let what cannot be traced run as it was written: its own errors arrive from there."""
        self.skipped(code, f"tracing failed, an error was suppressed: {type(error).__name__}: {_first_line(error)}")
        return True

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Hear from Dynamo that a frame runs as it was written; torch's own frames are not worth a line."""
        of_module = code.co_name == "forward" and code.co_filename.startswith(os.path.join(TORCH, "nn", "modules"))
        self._events += of_module or "suppressed" in reason
        if reason and not code.co_filename.startswith((TORCH, STDLIB, HERE, "<")):
            self.pieces.append(Piece(f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}", reason))

    def broke(self, reason: str, stack: Any) -> None:
        """Hear from Dynamo that a graph ended before its frame did."""
        self._events += 1
        self.breaks.append(Piece(_line_of(stack), _cause(reason)))

    # -- weights --------------------------------------------------------------------------------------

    def _new_copies(self) -> WeightCopies | None:
        """Return what keeps the weights' copies; a compiler's graph holds plain casts, which it fuses or folds."""
        if self.compile != "eager" or self.policy.level == "O0" or not self.policy.weight_copies:
            return None
        dtype = self.policy.torch_dtype(device_of_model(self.model) or "cpu")
        made = WeightCopies(dtype, weakly(self._written_in_secret), is_verifying())
        # Dynamo may keep compiled code, and with it what that reads, for longer than the model lives.
        weakref.finalize(self, made.drop).atexit = False
        return made

    def _written_in_secret(self, weight: torch.Tensor) -> None:
        name = next((name for name, p in self.model.named_parameters() if p is weight), "a parameter")
        self._note(
            f"{name} was written without a trace in its version counter (through .data, say): weights are cast at each "
            "call from now on, until amp_graph.drop_weight_copies(model)"
        )
        warnings.warn(
            f"amp_graph: {type(self.model).__name__}: {self.notes[-1]}\n"
            "  fix:   write under torch.no_grad() to the parameter itself, or policy 'weight_copies=false'",
            AmpGraphWarning,
            stacklevel=4,
        )

    # -- copies ---------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        """Convert the copy of the model that is being made, as this one is; it captures its own graphs."""
        copied = memo.get(id(self.model))
        if copied is None:
            raise CaptureError("a conversion cannot be copied without its model\n  fix:   copy.deepcopy(model)")
        copy_masters(self.model, memo)
        wrapped = copy.deepcopy(self.wrapped, memo)
        return restore(copied, self.policy, self.compile, self.dynamic, self.strict, wrapped, self.measured)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the model and the options; graphs are captured again."""
        options = (self.policy, self.compile, self.dynamic, self.strict, self.wrapped, self.measured)
        return restore, (self.model, *options)


def restore(
    model: torch.nn.Module,
    policy: Policy,
    compile: Compile,
    dynamic: bool | None,
    strict: bool,
    wrapped: Callable[..., Any] | None = None,
    measured: tuple[Measured, ...] = (),
) -> Conversion:
    """Attach a conversion to a copied or unpickled model, whose own state may still be on its way."""
    made = Conversion(model, policy, compile, dynamic, strict, wrapped=wrapped, measured=measured)
    made.attach()
    return made


def _find_nothing(local: dict[str, Any]) -> None:
    """Find no compiled code: every call goes the long way."""


def conversion_of(model: Any) -> Conversion | None:
    """Return the conversion of ``model``, or None."""
    if isinstance(model, WRAPPERS):
        model = model.module
    found = getattr(model, "__dict__", {}).get(CONVERSION)
    return found if isinstance(found, Conversion) else None


def device_of_model(model: torch.nn.Module) -> str | None:
    """Return the type of the device that the model's parameters are on: the first but the CPU; None for that."""
    found = {p.device.type for p in model.parameters()}
    return next(iter(sorted(found - {"cpu"})), None)


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _cause(reason: str) -> str:
    """Return what Dynamo says of a break in one line: the problem, and its explanation where there is one."""
    found = re.search(r"Explanation: (.*)", reason)
    return _first_line(reason) + (f": {found.group(1).strip()}" if found else "")


def _line_of(stack: Any) -> str:
    """Return the user's line of a graph break."""
    own = [s for s in stack or () if not s.filename.startswith((HERE, TORCH))]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else ""
