"""The history of the loss scale: the scale of each step, and which were skipped, as a table.

Before: a loss scale of 2 at the end of a training, and no idea how it came to that. After:
``print(amp_graph.scale_history(step))``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from amp_graph.errors import CaptureError
from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer
from amp_graph.step.train_step import TrainStep

COLUMNS = ("step", "scale", "skipped")


@dataclass(frozen=True)
class ScaleHistory:
    """The last steps of a loss scale, oldest first.

    ``rows``: dicts of ``step`` (from 1, since the scale was made or unpickled), ``scale`` (by which the loss was
    multiplied) and ``skipped``: whether a gradient was infinite or NaN. ``steps``: how many there were in all;
    ``kept``: the most rows that are kept.
    """

    rows: tuple[dict[str, Any], ...]
    steps: int
    kept: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows."""
        return iter(self.rows)

    @property
    def skipped(self) -> tuple[dict[str, Any], ...]:
        """The rows of skipped steps."""
        return tuple(row for row in self.rows if row["skipped"])

    def text(self, last: int = 20) -> str:
        """Return a table of the ``last`` steps at which the scale changed or a step was skipped."""
        pairs = zip(self.rows, ({"scale": None}, *self.rows), strict=False)
        shown = [row for row, before in pairs if row["skipped"] or row["scale"] != before["scale"]]
        head = f"loss scale: {self.steps} steps, {len(self.skipped)} of the last {len(self.rows)} skipped"
        hidden = [f"  {len(shown) - last} earlier changes are not shown"] if len(shown) > last else []
        told = (
            f"  {row['step']:>7}  {row['scale']:<12g} {'skipped' * row['skipped']}".rstrip() for row in shown[-last:]
        )
        return "\n".join([head, *hidden, *told, ""])

    def __str__(self) -> str:
        """Return the table."""
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"format": 1, "steps": self.steps, "kept": self.kept, "rows": [dict(row) for row in self.rows]}


def scale_history(source: Any) -> ScaleHistory:
    """Return the history of the loss scale of ``source``.

    source: a ``TrainStep``, an ``amp_graph.GradScaler``, a ``LossScale``, or a ``MixedPrecisionOptimizer``. The last
    1000 steps are kept, on the device of the scale; this copies them to the host at once. Raises CaptureError for a
    source without a loss scale.
    """
    scale = scale_behind(source)
    if not isinstance(scale, LossScale):
        raise CaptureError(
            f"scale_history: a {type(source).__name__}{' without a loss scale' if scale is None else ''} has none\n"
            "  legal: a TrainStep with a loss scale, an amp_graph.GradScaler, a LossScale, a MixedPrecisionOptimizer\n"
            "  fix:   TrainStep(..., loss_scale=1.0), which checks, and skips bad steps, without scaling"
        )
    records = scale.records
    rows = records.rows(scale.values()[3])
    return ScaleHistory(tuple(dict(zip(COLUMNS, row, strict=True)) for row in rows), records.count, records.most)


def scale_behind(source: Any) -> Any:
    """Return the loss scale, or torch's own scaler, of a step, a scaler or an optimizer; else ``source`` itself."""
    if isinstance(source, TrainStep):
        return source.loss_scale
    scaler = source.scaler if isinstance(source, MixedPrecisionOptimizer) else source
    return scaler._loss_scale if isinstance(scaler, GradScaler) else scaler
