"""Reports calls and code that could not run as planned: by a note in the report, a warning, or (strict) an error.

Before: a call under a dispatch mode, or one in which no graph ran; a graph that ends at a ``print``. After: "called
under FlopCounterMode, ..." or "nothing was captured, so this call ran in fp32: ..." once as an AmpGraphWarning and a
note, with the place and the fix; ``Place("model.py:80, in forward: ...", why)``.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.errors import CaptureError, warn
from amp_graph.lists.errors import first_line
from amp_graph.passes.calibration.node_keys import few
from amp_graph.passes.native.code_cache import FIX as OWN_FOLDER
from amp_graph.passes.native.jit_compiler import why_refused
from amp_graph.passes.torch_compat.dispatch import is_batched
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener
from amp_graph.passes.torch_compat.modules import is_sharded
from amp_graph.passes.torch_compat.optimizers import living
from amp_graph.policy_words import word_of
from amp_graph.rewrite import Rewritten, unkept, warn_of_full_precision
from amp_graph.scaling.loss_scale import LossScale

TORCH = os.path.dirname(torch.__file__)
STDLIB = os.path.dirname(os.__file__)
MIXED = re.compile(r"dtype|scalar type|Half|BFloat16")  # errors of operands of two dtypes
TRACE = "\nfrom user code:"  # Dynamo appends the lines on the way to an error, which may well say "dtype"
LINE = re.compile(r'File "(.+)", line (\d+)')
HERE = os.path.dirname(os.path.dirname(__file__))
# What the causes say where nothing was captured, and what helps; the first that matches.
FIXES = (
    (r"compiler\.disable|_dynamo\.disable", "remove the torch.compiler.disable, or convert the modules that it calls"),
    (
        r"[Dd]ata-dependent|generic_jump|_local_scalar_dense",
        "torch.where or torch.cond in place of the branch; is_causal=True beside a causal mask=",
    ),
    (r"sharded modules", "convert each part before sharding it: fully_shard(amp_graph.convert(part))"),
    (r"force_eager|stance", "torch.compiler.set_stance('default')"),
    (r"no tensor operations", "convert the module whose forward computes: model.forward calls none"),
    (r"tracing failed", "mend the error, or convert the submodules that can be captured"),
)
ELSE = "amp_graph.report(model).text() shows what was not captured; convert the submodules that can be"
UNKEPT_KEY = "keep_ops={} matches no operation that was captured, so it keeps nothing in fp32"
# The gradient of a loss is 1 and that of outputs under a mean loss less: a larger one was scaled by hand.
LARGEST_UNSCALED = 1.0
SCALING = (  # the lines that scale the loss
    "scaler = amp_graph.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); "
    "or policy 'bf16'"
)
WARNS = True  # whether missing kernels are reported; tests that remove the compiler turn it off
_warned: set[str] = set()  # reasons, once per process


class TwoDtypes(Exception):
    """A call cannot be traced as an operation has operands of two dtypes; raised before any part of it has run."""


@dataclass
class Place:
    """A place in the user's code where capture stopped, or that was not captured at all."""

    where: str
    reason: str


@dataclass
class Diagnostics(CaptureListener):
    """Reports for ``model``, and receives the events of its captures; ``strict``: raises CaptureError.

    ``silent``: warns of nothing, as the conversion that follows will. ``skips``: whole frames that Dynamo did not
    capture; ``breaks``: graph breaks. ``events``: their number since the unread parameters were last checked.
    """

    model: torch.nn.Module
    strict: bool = False
    silent: bool = False
    notes: list[str] = field(default_factory=list)
    skips: list[Place] = field(default_factory=list)
    breaks: list[Place] = field(default_factory=list)
    events: int = 0
    told: set[str] = field(default_factory=set)  # warnings of passes, each of which many graphs may give
    scale_is_known: bool = False  # whether gradients in fp16 have shown if losses are scaled

    # -- events of captures ---------------------------------------------------------------------------

    def failed(self, code: types.CodeType, error: Exception, *, whole: bool) -> bool:
        """Record a failed trace; the code runs uncaptured and raises its own errors.

        Raises TwoDtypes if nothing of a call has run yet, and autocast may run it.
        """
        if whole and MIXED.search(str(error).partition(TRACE)[0]):
            raise TwoDtypes from error
        self.skipped(code, f"tracing failed, an error was suppressed: {type(error).__name__}: {first_line(error)}")
        return True

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Record a frame that Dynamo skipped; torch's own frames are left out of the log."""
        of_module = code.co_name == "forward" and code.co_filename.startswith(os.path.join(TORCH, "nn", "modules"))
        self.events += of_module or "suppressed" in reason
        if reason and not code.co_filename.startswith((TORCH, STDLIB, HERE, "<")):
            self.skips.append(Place(f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}", reason))

    def broke(self, reason: str, stack: Any) -> None:
        """Record a graph break."""
        self.events += 1
        self.breaks.append(break_at(reason, stack))

    # -- reports ------------------------------------------------------------------------------------------

    def warn(self, what: str, causes: str = "", *, only_note: bool = False, fix: str = "") -> None:
        """Report ``what`` once, with its causes; raises CaptureError if strict, and is a note alone if silent."""
        message = f"{what}: {causes}" if causes else what
        if self.silent:
            self.note(message)
            return
        text = f"amp_graph: {type(self.model).__name__}: {message}"
        if self.strict:
            raise CaptureError(text + "\n  fix:   see amp_graph.report(model); strict=False makes this a warning")
        if not any(note.startswith(what) for note in self.notes):  # the causes accumulate over calls
            self.note(message)
            if not only_note:
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

    def unkept(self, found: Iterable[Rewritten]) -> None:
        """Warn once of a key of ``keep_ops`` that no graph has, if one has operations of its module."""
        for name, near in unkept(found).items():
            if near:
                self.warn(UNKEPT_KEY.format(name), fix=f"keep_ops={few(near)}")

    def uncaptured_call(self, forward: Callable[..., Any], how: str) -> None:
        """Report that no graph ran in a call of ``forward``, and ``how`` further ones run."""
        code = getattr(inspect.unwrap(forward), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code is not None else ""
        causes = self._causes() or "no tensor operations"
        if where and not re.search(r"\.py:\d+", causes):  # they name no line
            causes = f"{where}: {causes}"
        then = "" if how == "in fp32" else f", and further ones run {how}"
        self.warn(f"nothing was captured, so this call ran in fp32{then}", causes, fix=fix_of(causes))

    def uncaptured_parts(self, unread: list[str], how: str, *, only_note: bool) -> None:
        """Report the parameters that no captured graph has read; ``how`` further calls run, or "" for as this one."""
        then = f"further calls run without graphs, {how}" if how else "the code that reads them runs in fp32"
        self.warn(
            f"only a part of the forward was captured: no graph reads {len(unread)} parameters ({few(unread)}); {then}",
            self._causes(),
            only_note=only_note,
        )

    def _causes(self) -> str:
        """Return in one line why capture was incomplete."""
        sharded = [name for name, part in self.model.named_modules() if name and is_sharded(part)]
        if sharded:
            return (
                f"the hooks of {len(sharded)} sharded modules ({sharded[0]}, ...) cannot be captured; convert each one "
                "before sharding it: fully_shard(amp_graph.convert(part))"
            )
        found = dict.fromkeys(f"{s.where}: {first_line(s.reason)}".strip(": ") for s in (*self.breaks, *self.skips))
        return "; ".join(list(found)[-3:])  # the last few distinct ones

    # -- fp16 without a loss scale: gradients below 3.0e-08 become 0 --------------------------------------

    def check_scale(self, grad: torch.Tensor) -> None:
        """Look once at a gradient of a model in fp16; a hook on the results of its graphs."""
        if self.scale_is_known or type(grad) is not torch.Tensor or grad.layout != torch.strided or not grad.numel():
            return
        if is_batched(grad) or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        largest = float(torch.linalg.vector_norm(grad.detach(), math.inf))
        if not 0 < largest < math.inf:  # a masked loss, or an overflow
            return
        self.scale_is_known = True
        if largest <= LARGEST_UNSCALED and not has_scaler():
            what = "trains in fp16, and nothing in this process scales losses: gradients below 3.0e-08 become 0"
            self.note(f"{what}; scale the loss")
            warn(f"amp_graph: {type(self.model).__name__} {what}\n  fix:   {SCALING}")


def break_at(reason: str, stack: Any) -> Place:
    """Return the user's line of a graph break, and Dynamo's description and explanation of it."""
    explained = re.search(r"Explanation: (.*)", reason)
    told = first_line(reason) + (f": {explained.group(1).strip()}" if explained else "")
    own = [s for s in stack or () if not s.filename.startswith((HERE, TORCH))]
    return Place(f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else "", told)


def failed_at(error: object) -> str:
    """Return the user's line of a failed trace, and the error that Dynamo met there."""
    text, _, trace = str(error).partition(TRACE)
    met = re.search(r": got (\w+)\(['\"](.*)['\"]\)$", text, re.MULTILINE)
    lines = [f"{file}:{n}: " for file, n in LINE.findall(trace) if not file.startswith((HERE, TORCH))]
    return "".join(lines[-1:]) + (": ".join(met.groups()) if met else first_line(error))


def fix_of(causes: str) -> str:
    """Return the fix for these causes, in one line."""
    return next((fix for pattern, fix in FIXES if re.search(pattern, causes)), ELSE)


def warn_of_missing_kernels() -> None:
    """Warn of each new reason for which kernels could not be compiled or loaded."""
    for why, names in why_refused().items():
        if WARNS and why not in _warned:
            _warned.add(why)
            warn(
                f"amp_graph: torch's kernels run in place of compiled ones ({', '.join(names)}), which is slower: "
                f"{why}\n"
                f"  fix:   install gcc or clang, or set CC; a folder that can be written: {OWN_FOLDER}"
            )


def has_scaler() -> bool:
    """Return whether a loss scale exists: a gradient scaler, ours or torch's, or that of a TrainStep."""
    return bool(living(LossScale)) or any(one.is_enabled() for one in living(torch.amp.GradScaler))
