"""The tables of ``peak_memory.py``: all of a file of results, and a narrow one for docs/internals/memory.md.

Before: ``{"runs": [{"options": ..., "results": {"SGD": {"lstm": {"autocast": {"whole": ...}}}}}]}``. After: Markdown.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tables import about

# A table has a column for each of these that was measured: "convert, auto" when `convert` kept free memory by itself.
WAYS = ("fp32", "autocast", "convert", "convert, auto", "TrainStep")
BASE, OURS = "autocast", ("convert", "convert, auto", "TrainStep")
OF_PROCESS = {"whole": "The process, capture included", "steps": "The process, without the first steps"}
FIGURES = {
    "cpu": OF_PROCESS | {"allocated": "PyTorch's allocator"},
    "cuda": OF_PROCESS
    | {"device": "The device, capture included", "device_steps": "The device, without the first steps"},
}
READ = """\
Peaks in MB beyond the model and the imports, which were there before the first step; the last columns are ratios to
autocast, below 1 is less. An empty cell was not measured. Written by `benchmarks/peak_memory.py`, which says more."""
Results = dict[str, Any]
Rows = dict[str, dict[str, Any]]


def markdown(held: Results) -> str:
    """Return everything in a file of results as Markdown."""
    lines = ["# The peak of memory in training", "", about(held["machine"]), "", READ]
    for run in held["runs"]:
        for figure, what in FIGURES[run["options"]["device"]].items():
            lines += ["", f"## {what}: {_title(run['options'])}", "", *_table(run, figure)]
    return "\n".join(lines) + "\n"


def narrow(held: Results) -> str:
    """Return one table of the first run: the peak of the process, and the allocator's over autocast's."""
    run = held["runs"][0]
    lines = [f"{about(held['machine'])} {_title(run['options'])}.", ""]
    ours = _measured(OURS, run)
    heads = ["autocast, MB", *(f"{way}, MB" for way in ours), *(f"{way} / autocast" for way in ours)]
    heads += [f"allocated, {way} / autocast" for way in ours]
    lines += [f"| model | optimizer | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    for model, optimizer, rows in _rows(run):
        cells = [_mb(rows, way, "whole") for way in (BASE, *ours)]
        cells += [_over(rows, way, figure) for figure in ("whole", "allocated") for way in ours]
        lines.append(f"| {model} | {optimizer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _title(options: Results) -> str:
    return f"bf16, {options['device']}, 1 thread, fused optimizers of PyTorch"


def _table(run: Results, figure: str) -> Iterator[str]:
    ways, ours = _measured(WAYS, run), _measured(OURS, run)
    heads = [*ways, *(f"{way} / autocast" for way in ours)]
    yield f"| model | optimizer | {' | '.join(heads)} |"
    yield "|---|---|" + "---:|" * len(heads)
    for model, optimizer, rows in _rows(run):
        cells = [*(_mb(rows, way, figure) for way in ways), *(_over(rows, way, figure) for way in ours)]
        yield f"| {model} | {optimizer} | {' | '.join(cells)} |"


def _measured(ways: Sequence[str], run: Results) -> list[str]:
    return [way for way in ways if any(way in rows for _, _, rows in _rows(run))]


def _rows(run: Results) -> Iterator[tuple[str, str, Rows]]:
    for optimizer, models in run["results"].items():
        for model in sorted(models):
            yield model, optimizer, models[model]


def _mb(rows: Rows, way: str, figure: str) -> str:
    size = rows.get(way, {}).get(figure)
    return "" if size is None else f"{size / 1e6:,.0f}"


def _over(rows: Rows, way: str, figure: str) -> str:
    size, base = (rows.get(one, {}).get(figure) for one in (way, BASE))
    return "" if size is None or base is None else f"{size / base:.2f}"
