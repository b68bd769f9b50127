"""Converts the models that are trained, and keeps what the exit report says of them.

Converted models are saved, copied, traced and exported as if they were not.

The only file of the room that imports ``convert``, ``capture`` and ``report``, and with them Dynamo: it is imported
when the first model is converted.
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

from amp_graph.capture.conversion import Conversion, conversion_of, whole_of
from amp_graph.capture.diagnostics import CONVERSION
from amp_graph.convert import convert, refuse_what_cannot_be_converted, revert
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.report.model_report import Report, report
from amp_graph.report.records import GraphReport
from amp_graph.run.eligibility import inner_of
from amp_graph.run.options import RunOptions
from amp_graph.run.own_scale import OwnScale as OwnScale


class Converted:
    """The converted modules of one model of the script, and their newest reports; no strong reference to them."""

    def __init__(self, parts: list[tuple[str, torch.nn.Module]]) -> None:
        """Take the modules that were just converted, by path."""
        self.parts = [(path, weakref.ref(inner_of(part))) for path, part in parts]
        self.whole = [path for path, _ in self.parts] == [""]
        self.reports: dict[str, Report] = {}
        self.changed: Callable[[], None] = lambda: None
        self._graphs = 0

    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield what is converted, and its submodules."""
        for _, ref in self.parts:
            if (part := ref()) is not None:
                yield from part.modules()

    def refresh(self) -> None:
        """Make new reports if graphs were captured since the last ones: the model may be gone at exit."""
        count = 0
        for _, ref in self.parts:
            found = _conversion(ref())
            count += len(found.graphs) if found is not None else 0
        if count != self._graphs:
            self._graphs = count
            self.changed()
            self.finish()

    def finish(self) -> None:
        """Make new reports of the models that are still there."""
        for path, ref in self.parts:
            module = ref()
            if module is not None and _conversion(module) is not None:
                self.reports[path] = report(module)

    def summary(self) -> str:
        """Return the graphs and casts in words."""
        graphs = [graph for found in self.reports.values() for graph in found.graphs]
        if not graphs:
            return next((found.status for found in self.reports.values() if found.status), "not called since")
        most = max(graphs, key=lambda graph: len(graph.casts))
        low = sum(any(node.precision == "low" for node in graph.operations) for graph in graphs)
        casts = f"up to {len(most.casts)} casts a call{_of_autocast(most)}"
        told = [f"{len(graphs)} graph{'s' * (len(graphs) != 1)}", casts]
        if low < len(graphs):
            told.append(f"{len(graphs) - low} of the graphs all in fp32")
        return ", ".join(told)


def _of_autocast(graph: GraphReport) -> str:
    """Return the number of casts that ``torch.autocast`` makes in the same graph."""
    found = graph.autocast
    return "" if found is None else f" (torch.autocast: {'not counted' if found.why_not else found.all})"


def _conversion(module: torch.nn.Module | None) -> Conversion | None:
    return None if module is None else conversion_of(module)


def why_not(module: torch.nn.Module, options: RunOptions) -> str:
    """Return why ``module`` could not be converted; "" if it could."""
    parts = chosen_parts(module, options)
    if not parts:
        return _no_match(options)
    try:
        for _, part in parts:
            refuse_what_cannot_be_converted(inner_of(part), options.policy)
    except AmpGraphError as error:
        return _with_fix(error)
    return ""


def is_part_of_converted(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a submodule of a converted model."""
    return whole_of(inner_of(module)) is not None


def convert_trained(module: torch.nn.Module, options: RunOptions, note: Callable[[str], None]) -> Converted | str:
    """Convert ``module``, or the parts that ``only`` chooses; or return why it is left as written."""
    parts = chosen_parts(module, options)
    if not parts:
        return _no_match(options)
    done = []
    with Attempt() as tried:  # whatever it is, the script must go on
        for path, part in parts:
            convert(part, options.policy, compile=options.compile)
            done.append((path, part))
            keep_as_written(inner_of(part))
    if (error := tried.error) is not None:
        for _, part in done:
            revert(part)
        return _with_fix(error) if isinstance(error, AmpGraphError) else f"{type(error).__name__}: {error}"
    return Converted(parts)


def undo(made: Converted | None) -> None:
    """Revert what is still converted, as a larger model is to be."""
    for _, ref in made.parts if made is not None else ():
        module = ref()
        if module is not None and _conversion(module) is not None:
            revert(module)


def chosen_parts(module: torch.nn.Module, options: RunOptions) -> list[tuple[str, torch.nn.Module]]:
    """Return the outermost modules that ``only`` matches, by class or path; without it the whole ``module``."""
    if options.only is None:
        return [("", module)]
    found: list[tuple[str, torch.nn.Module]] = []
    for path, part in inner_of(module).named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer, _ in found)
        if not inside and (options.only.fullmatch(type(part).__name__) or (path and options.only.fullmatch(path))):
            found.append((path, part if path else module))
    return found


def _no_match(options: RunOptions) -> str:
    return f"none of its modules matches --only {options.only.pattern if options.only else ''}"


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
