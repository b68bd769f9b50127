"""Converts the models that are trained, and keeps what the exit report says of them.

Converted models are saved, copied, traced and exported as if they were not.

The only file of the room that imports ``convert``, ``capture`` and ``report``, and with them Dynamo: it is imported
when the first model is converted.
"""

from __future__ import annotations

import contextlib
import copyreg
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.capture.conversion import whole_of as whole_of
from amp_graph.convert import convert, refuse_what_cannot_be_converted, revert
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.model_state import CONVERSION
from amp_graph.report.model_report import report
from amp_graph.run.eligibility import inner_of
from amp_graph.run.options import RunOptions
from amp_graph.scaling.loss_scale import LossScale as LossScale

if TYPE_CHECKING:
    from amp_graph.run.trained_models import Model


def refresh(model: Model, *, at_exit: bool = False) -> None:
    """Make a new report if graphs were captured since the last one, as the model may be gone ``at_exit``."""
    found = conversion_of(inner_of(model.ref()))
    if found is not None and (at_exit or len(found.graphs) != model.graphs):
        model.graphs, model.report = len(found.graphs), report(found.model)


def undo(model: Model) -> None:
    """Revert the model if it is still converted, as a larger one is to be."""
    if (found := conversion_of(inner_of(model.ref()))) is not None:
        revert(found.model)


def why_not(module: torch.nn.Module, options: RunOptions) -> str:
    """Return why ``module`` could not be converted; "" if it could."""
    try:
        refuse_what_cannot_be_converted(inner_of(module), options.policy)
    except AmpGraphError as error:
        return _with_fix(error)
    return ""


def convert_trained(module: torch.nn.Module, options: RunOptions) -> str:
    """Convert ``module``; return why it is left as written, "" if it is not."""
    with Attempt() as tried:  # whatever it is, the script must go on
        convert(module, options.policy, compile=options.compile)
        keep_as_written(inner_of(module))
        return ""
    return _with_fix(tried.error) if isinstance(tried.error, AmpGraphError) else tried.reason


def _with_fix(error: BaseException) -> str:
    line, _, rest = str(error).partition("\n")
    fix = next((r.strip() for r in rest.splitlines() if r.strip().startswith("fix:")), "")
    return line.removeprefix("convert: ") + (f" ({' '.join(fix.split())})" if fix else "")


# -- save, copy, trace and export as written ----------------------------------------------------------


ENTRIES = (
    (torch.jit, ("script", "trace", "trace_module")),
    (torch.export, ("export", "draft_export")),
    (torch.onnx, ("export",)),
)
"""The functions that read the source of a model's forward, or trace it."""

_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_lock = threading.RLock()


def keep_as_written(model: torch.nn.Module) -> None:
    """Let ``model``, which was just converted, be saved and exported as written."""
    if not _models:
        _pickle_as_written()
        for place, names in ENTRIES:
            for name in names:
                setattr(place, name, _not_converted()(getattr(place, name)))
    _models.add(model)


def _pickle_as_written() -> None:
    plain: Callable[[Any], Any] = torch.nn.Module.__getstate__

    def __getstate__(self: torch.nn.Module) -> Any:
        state = plain(self)
        found = state.get(CONVERSION) if isinstance(state, dict) else None
        if not isinstance(found, Conversion):
            return state
        kept = {name: value for name, value in state.items() if name not in (CONVERSION, "forward")}
        return kept if found.wrapped is None else {**kept, "forward": found.wrapped}

    torch.nn.Module.__getstate__ = __getstate__  # type: ignore[method-assign]
    # As the method that it stands for: classes may have a __getstate__ of their own.
    copyreg.pickle(Conversion, lambda found: (getattr, (found.model, "forward")))


@contextlib.contextmanager
def _not_converted() -> Iterator[None]:
    """Take all conversions out of their models for a while."""
    with _lock:
        found = [(m, c) for m in list(_models) if (c := conversion_of(m)) is not None and m.forward is c]
        for model, conversion in found:
            del model.__dict__["forward"], model.__dict__[CONVERSION]
            if conversion.wrapped is not None:
                model.__dict__["forward"] = conversion.wrapped
        try:
            yield
        finally:
            for model, conversion in found:
                model.__dict__.update({CONVERSION: conversion, "forward": conversion})
