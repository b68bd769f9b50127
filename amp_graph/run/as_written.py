"""Lets a script save, copy, trace and export its converted models as if they were not converted.

``torch.save(model)`` writes what a process without amp_graph loads; ``torch.jit.script(model)`` and
``torch.export.export(model, ...)`` see the model's own forward.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.capture.diagnostics import CONVERSION

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
        _export_as_written()
    _models.add(model)


# -- saving ---------------------------------------------------------------------------------------------


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
    copyreg.pickle(Conversion, _its_forward)  # classes may have a __getstate__ of their own


def _its_forward(found: Conversion) -> tuple[Any, ...]:
    """Pickle a conversion as the method that it stands for."""
    return getattr, (found.model, "forward")


# -- exporting ------------------------------------------------------------------------------------------


def _export_as_written() -> None:
    for place, names in ENTRIES:
        for name in names:
            if hasattr(place, name):
                setattr(place, name, _without_conversions(getattr(place, name)))


def _without_conversions(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _not_converted():
            return function(*args, **kwargs)

    return call


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
