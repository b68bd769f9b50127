"""Tables for the terminal, and the pictures of the loss curves.

One table a model: a row for each variant, every speed relative to torch.autocast in the same dtype. One more for what
loss scaling does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from examples.demo.data import MissingData
from examples.demo.explain import Row
from examples.demo.interleaved_training import Result
from examples.demo.tasks import Task
from examples.demo.underflow import SMALLEST, Outcome

LEAST_WIDTH = 100
LOOK: Any = {"box": SIMPLE, "padding": (0, 1, 0, 0), "pad_edge": False}


def console() -> Console:
    """Return a console that is wide enough for the tables, also in a log or a narrow terminal."""
    return Console(record=True, highlight=False, width=max(Console().width, LEAST_WIDTH))


def results_table(task: Task, results: Mapping[str, Sequence[Result]]) -> Table:
    """Return the table of one model; a rule divides the two low precisions."""
    table = Table(title=f"{task.name}: {task.title}", title_justify="left", title_style="bold", **LOOK)
    table.add_column("variant", no_wrap=True)
    heads = (
        "steps x\nbatch",
        "train\nloss",
        "held-out\nloss (accuracy)",
        "speed / autocast\nmedian [p25-p75]",
    )
    for head in (*heads, "casts /\nstep", "saved\nMB", "ops low\n/ full"):
        table.add_column(head, justify="right", no_wrap=True)
    for rows in results.values():
        for row in rows:
            table.add_row(*_cells(row))
        table.add_section()
    return table


def _cells(row: Result) -> tuple[str, ...]:
    middle, low, high = row.speed
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
    table.add_column("operations", overflow="fold", max_width=34)
    table.add_column("count", justify="right")
    table.add_column("precision")
    table.add_column("reason", overflow="fold")
    for op, count, precision, reason in rows:
        table.add_row(op, str(count), precision, reason)
    return table


def underflow_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of the experiment on loss scaling."""
    title = "underflow: narrow stack on digits, loss weighted by 2^-20"
    table = Table(title=title, title_justify="left", title_style="bold", **LOOK)
    table.add_column("variant", no_wrap=True)
    for head in (
        "gradient values that are\nzero in the first step",
        "steps",
        "train\nloss",
        "held-out\nloss (accuracy)",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for one in outcomes:
        zeros = f"{one.zeros:,} of {one.values:,} ({one.zeros / one.values:.2%})"
        held_out = f"{one.held_out_loss:.3f} ({one.held_out_accuracy:.1%})"
        table.add_row(one.variant, zeros, str(one.steps), f"{one.loss:.3f}", held_out)
    return table


def draw_underflow(outcomes: Sequence[Outcome], path: Path) -> None:
    """Save the loss curves of the experiment on loss scaling, beside how large the first step's gradients were."""
    pyplot = _pyplot()
    figure, (curves, sizes) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for i, one in enumerate(outcomes):
        # The last two, which are amp_graph's, lie thin on top of what they should be like.
        look: Any = {"color": f"C{i}", "alpha": 0.4, "linewidth": 5} if i < 2 else {"color": f"C{i}", "linewidth": 1.5}
        label = f"{one.variant}: {one.zeros:,} of {one.values:,} gradient values are zero in the first step"
        curves.plot(_smooth(one.losses), label=label, **look)
        sizes.bar(list(one.exponents), list(one.exponents.values()), width=1, align="edge", alpha=0.5, color=f"C{i}")
    curves.set_title("loss weighted by 2^-20: training loss, without the weight", fontsize=9)
    curves.set(xlabel="step", ylabel="training loss (smoothed)")
    sizes.axvline(SMALLEST, color="black", linewidth=1, label=f"fp16's smallest number, 2^{SMALLEST}")
    sizes.set_title("the first step's gradients, as backward left them", fontsize=9)
    sizes.set(xlabel="power of two", ylabel="values that are not zero")
    figure.legend(loc="outside lower center", fontsize=8)
    _save(figure, path)
    pyplot.close(figure)


def draw(all_results: Mapping[str, Mapping[str, Sequence[Result]]], titles: Mapping[str, str], path: Path) -> None:
    """Save the loss curves of all variants, a column for each model and a row for each low precision."""
    pyplot = _pyplot()
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
    _save(figure, path)
    pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingData("demo: matplotlib is not installed\n  fix:   pip install 'amp-graph[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _smooth(losses: Sequence[float], keep: float = 0.8) -> list[float]:
    """Return the exponential moving average."""
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else keep * smooth[-1] + (1 - keep) * loss)
    return smooth
