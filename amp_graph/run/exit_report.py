"""What ``amp-graph run`` prints to stderr when the script ends, and the HTML report of the converted models.

``amp-graph run: converted 1 model, policy bf16`` and a line for each model; or the same as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_graph.errors import AmpGraphError
from amp_graph.run.trained_models import Model, State, TrainedModels

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

MOST = 12  # lines of a kind
NO_MODULE = "the script called no module with parameters"


def is_first_rank() -> bool:
    """Return whether this process is the one that prints: rank 0, or without ranks."""
    return os.environ.get("RANK", "0") in ("", "0")


def exit_report(models: TrainedModels, notes: Counter[str]) -> str:
    """Return the exit report as text, or as JSON in one line; writes the HTML pages that were asked for."""
    converted = [m for m in models.seen if m.state is State.CONVERTED]
    left = [m for m in models.seen if m.state in (State.LEFT, State.WATCHED)]
    options = models.options
    told = {
        "policy": str(options.policy), "compile": options.compile, "dry_run": options.dry_run,
        "converted": [_plain(models, m) for m in converted],
        "not_converted": [_plain(models, m) | {"why": m.why_not_converted()} for m in left],
        "notes": models.scaling.lines() + [" ".join(n.removeprefix("amp_graph: ").split()) for n in notes.elements()],
        "files": list(write_reports(models, options.report)) if options.report is not None else [],
    }  # fmt: skip
    return json.dumps(told) if options.json else "amp-graph run: " + "\n".join(_lines(told))


def _plain(models: TrainedModels, model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model.kind, "parameters": model.parameters, "called_at": model.site}
    if model.is_converted:
        models.conversions.refresh(model, at_exit=True)
        page = model.report
        found |= {"text": _summary(page), "graphs": len(page.graphs) if page else 0}
        found["summary"] = page.summary() if page else {}
    return found


def _summary(page: Report | None) -> str:
    """Return the graphs and casts in words."""
    if page is None or not page.graphs:
        return "not called since" if page is None else page.status
    most = max(len(graph.casts) for graph in page.graphs)
    return f"{len(page.graphs)} graph{'s' * (len(page.graphs) != 1)}, up to {most} casts a call"


def _lines(told: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the exit report."""
    converted, left = told["converted"], told["not_converted"]
    if converted:
        verb = "would convert" if told["dry_run"] else "converted"
        count = f"{len(converted)} model{'s' * (len(converted) != 1)}"
        yield f"{verb} {count}, policy {told['policy']}, compile {told['compile']}"
    else:
        yield "nothing was converted" if left else f"nothing was converted: {NO_MODULE}"
    yield from _few(f"  {_named(m)}{': ' + m['text'] if 'text' in m else ''}" for m in converted)
    yield from _few(f"  not converted: {_named(m)}: {m['why']}" for m in left)
    yield from _few(f"  note: {text}" for text in told["notes"])
    yield from told["files"]


def _named(model: dict[str, Any]) -> str:
    return f"{model['model']} ({model['parameters']:,} parameters), called at {model['called_at']}"


def _few(lines: Iterable[str]) -> Iterator[str]:
    counts = Counter(lines)
    for line, count in list(counts.items())[:MOST]:
        yield line if count == 1 else f"{line} (x{count})"
    if len(counts) > MOST:
        yield f"  and {len(counts) - MOST} more such lines"


def write_reports(models: TrainedModels, path: Path) -> Iterator[str]:
    """Write the HTML pages of the converted models, and yield a line on each: FILE, then FILE with a number."""
    pages = [page for m in models.seen if m.is_converted and (page := m.report) is not None]
    if not pages:
        yield f"--report {path}: not written, as no model was converted and called"
    for i, page in enumerate(pages):
        target = path if not i else path.with_name(f"{path.stem}-{i + 1}{path.suffix}")
        try:
            page.html(target)
        except (OSError, AmpGraphError) as error:
            yield f"--report {target}: not written: {getattr(error, 'strerror', None) or error}"
        else:
            yield f"report of {page.model}: {target}"
