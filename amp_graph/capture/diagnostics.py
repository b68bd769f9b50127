"""Reports calls and code that could not run as planned: by a note in the report, a warning, or (strict) an error.

Before: a call under a dispatch mode, or one in which no graph ran. After: "called under FlopCounterMode, ..." or
"nothing was captured, so this call ran in fp32: ..." once as an AmpGraphWarning and a note, with the place and the fix.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.capture_log import CaptureLog
from amp_graph.errors import CaptureError, warn
from amp_graph.graph_log import warn_of_full_precision
from amp_graph.passes.native.code_cache import FIX as OWN_FOLDER
from amp_graph.passes.native.jit_compiler import why_refused
from amp_graph.passes.torch_compat.modules import is_sharded
from amp_graph.policy_words import word_of

NAMED = 3  # of the parameters that no graph reads
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
CONVERSION = "_amp_graph"  # the attribute that marks a converted model
WARNS = True  # whether missing kernels are reported; tests that remove the compiler turn it off
_warned: set[str] = set()  # reasons, once per process


@dataclass
class Diagnostics:
    """Reports for ``model``; ``strict``: raises CaptureError. ``log``: what its captures left out.

    ``silent``: warns of nothing, as the conversion that follows will.
    """

    model: torch.nn.Module
    strict: bool = False
    silent: bool = False
    log: CaptureLog = field(default_factory=CaptureLog)
    notes: list[str] = field(default_factory=list)

    def warn(self, what: str, causes: str = "", *, only_note: bool = False, fix: str = "") -> None:
        """Report ``what`` once, with its causes; raises CaptureError if strict."""
        if self.silent:
            return
        message = f"{what}: {causes}" if causes else what
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

    def uncaptured_call(self, forward: Callable[..., Any], how: str) -> None:
        """Report that no graph ran in a call of ``forward``, and ``how`` further ones run."""
        code = getattr(inspect.unwrap(forward), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code is not None else ""
        causes = _with_place(self._causes() or "no tensor operations", where)
        then = "" if how == "in fp32" else f", and further ones run {how}"
        self.warn(f"nothing was captured, so this call ran in fp32{then}", causes, fix=fix_of(causes))

    def uncaptured_parts(self, unread: list[str], how: str, *, only_note: bool) -> None:
        """Report the parameters that no captured graph has read; ``how`` further calls run, or "" for as this one."""
        few = ", ".join(unread[:NAMED]) + (", ..." if len(unread) > NAMED else "")
        then = f"further calls run without graphs, {how}" if how else "the code that reads them runs in fp32"
        self.warn(
            f"only a part of the forward was captured: no graph reads {len(unread)} parameters ({few}); {then}",
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
        return self.log.causes()


def fix_of(causes: str) -> str:
    """Return the fix for these causes, in one line."""
    return next((fix for pattern, fix in FIXES if re.search(pattern, causes)), ELSE)


def _with_place(causes: str, where: str) -> str:
    """Return ``causes`` with ``where``, the user's forward, if they name no line."""
    return causes if re.search(r"\.py:\d+", causes) or not where else f"{where}: {causes}"


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
