"""Tables for the terminal, and the picture of the loss curves.

One table a model: a row for each variant, every time as a ratio to torch.autocast in the same dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from amp_graph.demo.data import MissingData
from amp_graph.demo.explain import Row
from amp_graph.demo.race import Result
from amp_graph.demo.tasks import Task

LEAST_WIDTH = 100
LOOK: Any = {"box": SIMPLE, "padding": (0, 1, 0, 0), "pad_edge": False}


def console() -> Console:
    """Return a console that is wide enough for the tables, also in a log or a narrow terminal."""
    made = Console(record=True, highlight=False)
    return Console(record=True, highlight=False, width=max(made.width, LEAST_WIDTH))


def results_table(task: Task, results: Mapping[str, Sequence[Result]]) -> Table:
    """Return the table of one model; a rule divides the two low precisions."""
    table = Table(title=f"{task.name}: {task.title}", title_justify="left", title_style="bold", **LOOK)
    table.add_column("variant", no_wrap=True)
    heads = (
        "steps x\nbatch",
        "train\nloss",
        "held-out\nloss (accuracy)",
        "time / autocast\nmedian [p25-p75]",
    )
    for head in (*heads, "casts /\nstep", "saved\nMB", "ops low\n/ full"):
        table.add_column(head, justify="right", no_wrap=True)
    for rows in results.values():
        for row in rows:
            table.add_row(*_cells(row))
        table.add_section()
    return table


def _cells(row: Result) -> tuple[str, ...]:
    middle, low, high = row.ratio
    operations = f"{row.operations['low']} / {row.operations['full']}" if row.operations else ""
    return (
        row.variant,
        f"{row.steps} x {row.batch}",
        f"{row.loss:.3f}",
        f"{row.held_out_loss:.3f} ({row.held_out_accuracy:.1%})",
        "1" if middle == low == high == 1 else f"{middle:.2f} [{low:.2f}-{high:.2f}]",
        f"{row.casts}",
        f"{row.saved_mb:.1f}",
        operations,
    )


def excerpt_table(task: Task, rows: Sequence[Row]) -> Table:
    """Return the table of what ran where and why."""
    title = f"{task.name}, amp_graph bf16: which operation ran in which precision, and why (excerpt)"
    table = Table(title=title, title_justify="left", title_style="bold", **LOOK)
    table.add_column("operation", overflow="fold", max_width=34)
    table.add_column("count", justify="right")
    table.add_column("precision")
    table.add_column("reason", overflow="fold")
    for op, count, precision, reason in rows:
        table.add_row(op, str(count), precision, reason)
    return table


def draw(all_results: Mapping[str, Mapping[str, Sequence[Result]]], titles: Mapping[str, str], path: Path) -> None:
    """Save the loss curves of all variants, a column for each model and a row for each low precision."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingData("demo: matplotlib is not installed\n  fix:   pip install 'amp-graph[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(kind for results in all_results.values() for kind in results))
    size = (5 * len(all_results), 3.6 * len(kinds))
    figure, axes = pyplot.subplots(len(kinds), len(all_results), squeeze=False, figsize=size, layout="constrained")
    for column, (name, results) in enumerate(all_results.items()):
        for line, kind in enumerate(kinds):
            plot = axes[line][column]
            for style, row in zip(("-", "--", "-.", ":"), results[kind], strict=False):
                plot.plot(_smooth(row.losses), style, label=row.variant, linewidth=1.5)
            plot.set_title(f"{titles[name]}, {kind}", fontsize=9)
            plot.set(xlabel="step", ylabel="training loss (smoothed)")
            plot.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(losses: Sequence[float], keep: float = 0.8) -> list[float]:
    """Return the exponential moving average."""
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else keep * smooth[-1] + (1 - keep) * loss)
    return smooth
