"""What ``amp-graph run`` prints to stderr when the script ends, and the HTML report of the converted models.

``amp-graph run: converted 1 model, policy bf16`` and a line for each model.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.process
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from amp_graph.errors import AmpGraphError
from amp_graph.run.call_site import site_of_call
from amp_graph.run.trained_models import Model, State, TrainedModels

MOST = 12  # lines of a kind
NO_BACKWARD = "no backward reached the parameters of a module that the script called"
NO_MODULE = "the script called no module with parameters"


def is_first_rank() -> bool:
    """Return whether this process is the one that prints: rank 0, or without ranks."""
    return os.environ.get("RANK", "0") in ("", "0")


def report_json(models: TrainedModels, workers: Workers, notes: Counter[str]) -> str:
    """Return the exit report as JSON in one line, with the figures of each converted model's report."""
    converted, left = _sorted(models)
    options = models.options
    files = list(write_reports(models, options.report)) if options.report is not None else []
    return json.dumps({
        "policy": str(options.policy), "compile": options.compile, "dry_run": options.dry_run,
        "converted": [_plain(m) for m in converted],
        "not_converted": [_plain(m) | {"why": m.why_not_converted()} for m in left],
        "seconds_a_step": models.times.medians(),
        "notes": [*workers.lines(), *models.scaling.lines(), *map(_on_one_line, notes), *files],
    })  # fmt: skip


def _plain(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model.kind, "parameters": model.parameters, "called_at": model.site}
    if model.converted is not None:
        model.converted.finish()
        reports = model.converted.reports.items()
        found["graphs"] = sum(len(report.graphs) for _, report in reports)
        found["parts"] = {path: report.summary() for path, report in reports}
    return found


def _sorted(models: TrainedModels) -> tuple[list[Model], list[Model]]:
    """Return the models that are converted, and those that are not."""
    converted = [m for m in models.seen if m.state is State.CONVERTED]
    return converted, [m for m in models.seen if m.state in (State.LEFT, State.WATCHED)]


def report_lines(models: TrainedModels, workers: Workers, notes: Counter[str]) -> Iterator[str]:
    """Yield the lines of the exit report."""
    options = models.options
    converted, left = _sorted(models)
    if converted:
        verb = "would convert" if options.dry_run else "converted"
        count = f"{len(converted)} model{'s' * (len(converted) != 1)}"
        yield f"{verb} {count}, policy {options.policy}, compile {options.compile}"
        yield from _few(Counter(f"  {_told(m)}" for m in converted))
    else:
        yield f"nothing was converted{_why_nothing(models, left)}"
    yield from _few(Counter(f"  not converted: {_named(m)}: {m.why_not_converted()}" for m in left))
    yield from (f"  {line}" for line in (*workers.lines(), *models.scaling.lines(), *models.times.lines()))
    yield from _few(Counter({f"  note: {_on_one_line(text)}": n for text, n in notes.items()}))
    if options.report is not None:
        yield from write_reports(models, options.report)


def _why_nothing(models: TrainedModels, left: list[Model]) -> str:
    if any(m.state is State.LEFT or m.reason for m in left):
        return ""
    steps = models.times.steps
    what = NO_BACKWARD if models.seen else NO_MODULE
    return f": {what}" + (f", except in code that it compiled ({steps} optimizer steps)" if steps else "")


def _named(model: Model) -> str:
    return f"{model.kind} ({model.parameters:,} parameters), called at {model.site}"


def _told(model: Model) -> str:
    made = model.converted
    if made is None:  # a dry run
        return _named(model)
    made.finish()
    parts = "" if made.whole else f"; of it {', '.join(path for path, _ in made.parts)}"
    return f"{_named(model)}: {made.summary()}{parts}"


def _few(lines: Counter[str]) -> Iterator[str]:
    for line, count in list(lines.items())[:MOST]:
        yield line if count == 1 else f"{line} (x{count})"
    if len(lines) > MOST:
        yield f"  and {len(lines) - MOST} more such lines"


def _on_one_line(text: str) -> str:
    return " ".join(text.removeprefix("amp_graph: ").split())


def write_reports(models: TrainedModels, path: Path) -> Iterator[str]:
    """Write the HTML pages of the converted models, and yield a line on each: FILE, then FILE with a number."""
    pages = [found for m in models.seen if m.converted is not None for found in m.converted.reports.values()]
    if not pages:
        yield f"--report {path}: not written, as no model was converted and called"
    times = models.times.medians()
    for i, page in enumerate(pages):
        target = path if not i else path.with_name(f"{path.stem}-{i + 1}{path.suffix}")
        try:
            replace(page, times=times).html(target)
        except OSError as error:
            yield f"--report {target}: not written: {error.strerror or error}"
        except AmpGraphError as error:
            yield f"--report {target}: not written: {error}"
        else:
            yield f"report of {page.model}: {target}"


# -- processes that a script starts, in which nothing is converted ------------------------------------


LOADERS = "torch.utils.data"  # they load data, and train nothing


class Workers:
    """The processes that were started from now on."""

    def __init__(self) -> None:
        """Count the processes from now on."""
        self.found: Counter[tuple[bool, str]] = Counter()  # by whether they are forked, and the line
        plain = multiprocessing.process.BaseProcess.start

        @functools.wraps(plain)
        def start(process: Any) -> None:
            target = getattr(process, "_target", None)  # gone once it is started
            plain(process)
            if not getattr(target, "__module__", "").startswith(LOADERS):
                self.found[_is_forked(process), site_of_call()] += 1

        multiprocessing.process.BaseProcess.start = start  # type: ignore[assignment, method-assign]

    def lines(self) -> list[str]:
        """Return a line for each place that started processes."""
        return [_line(count, forked, site) for (forked, site), count in self.found.items()]


def _is_forked(process: Any) -> bool:
    """Return whether ``process`` begins with a copy of this one's memory, and of the models that are converted."""
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    return method == "fork"


def _line(count: int, forked: bool, site: str) -> str:
    several = count != 1
    workers = f"{count} worker process{'es' * several}"
    if forked:
        return (
            f"not reported: what {workers} train{'s' * (not several)}, forked at {site}: models that were converted "
            "before run converted there, others as written"
        )
    return (
        f"left as written: what {workers} train{'s' * (not several)}, started at {site}; in them: "
        "amp_graph.convert(model)"
    )
