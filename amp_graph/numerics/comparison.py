"""What a comparison found: an error per layer, worst first, as text, JSON, and rows for a report.

Before: errors by node. After: ``print(comparison.text())``, whose first line is the layer that introduces most.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from amp_graph.numerics.overflow.result import plain_values
from amp_graph.passes.graph.graph_text import aligned, grouped
from amp_graph.passes.native.output_file import write_or_refuse

SCHEMA, VERSION = "amp_graph.comparison", 1
COLUMNS = {
    "layer": "layer", "by": "introduced by", "introduced": "introduced", "precision": "precision",
    "error": "error", "autocast": "autocast", "fp32": "fp32",
    "gradient_error": "gradient", "gradient_autocast": "autocast", "gradient_fp32": "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """The errors of one operation: relative L2 errors against the reference, over all batches; None: not compared.

    ``key``: module path, operation and number, as the policy's ``keep_ops`` takes it. ``introduced``: the error that it
    added, relative to the outputs: forward's, or backward's if that is larger.
    """

    key: str
    layer: str
    precision: str
    reason: str
    where: str
    introduced: float
    error: float | None
    autocast: float | None
    fp32: float | None
    gradient_error: float | None
    gradient_autocast: float | None
    gradient_fp32: float | None


@dataclass(frozen=True)
class Comparison:
    """The errors of a plan, of autocast's and of fp32, by operation, worst first.

    operations: in the order of what they introduce. policy: what was compared. model: its class. batches: their number.
    reference: "fp64", or "fp32" with the reason. loss_scale: of the runs in low precision; gradients are compared
    unscaled. autocast_failed: why torch.autocast could not run the model, so that nothing is compared with it.
    """

    operations: tuple[Operation, ...]
    policy: str
    model: str
    batches: int
    reference: str
    loss_scale: float
    autocast_failed: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per layer (module), worst first, for tables and reports.

        ``by``: the operation of the layer that introduced most, with ``introduced``, ``precision``, ``reason`` and
        ``where`` of that. The errors are those of the layer's least exact operation.
        """
        layers = grouped((one.layer, one) for one in self.operations)
        return [_row(layer, found) for layer, found in layers.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, with ``schema`` and ``version``; infinite errors as text."""
        head = {"schema": SCHEMA, "version": VERSION, "model": self.model, "policy": self.policy,
                "batches": self.batches, "reference": self.reference, "loss_scale": self.loss_scale,
                "autocast_failed": self.autocast_failed}  # fmt: skip
        return head | plain_values({"layers": self.rows(), "operations": [vars(one) for one in self.operations]})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_dict()`` to ``path`` as JSON, or nothing. Raises AmpGraphError if it cannot be written."""
        write_or_refuse(path, json.dumps(self.to_dict(), indent=1) + "\n", "compare", "comparison.save('errors.json')")

    def text(self, most: int = 20) -> str:
        """Return a table of the ``most`` worst layers."""
        rows = self.rows()
        lines = [[*COLUMNS.values()], *([_cell(row[name]) for name in COLUMNS] for row in rows[:most])]
        scale = f", gradients with a loss scale of {self.loss_scale:g}" if self.loss_scale != 1.0 else ""
        head = (
            f"{self.model}, policy {self.policy}: relative errors against {self.reference}, over {self.batches} batches"
        )
        scale += f"\ntorch.autocast fails: {self.autocast_failed}" if self.autocast_failed else ""
        left = [f"and {len(rows) - most} more layers"] if len(rows) > most else []
        return "\n".join([head + scale, "", *aligned(lines), *left])


def _row(layer: str, found: list[Operation]) -> dict[str, Any]:
    first = found[0]
    worst = max(found, key=lambda one: _number(one.error))
    steep = max(found, key=lambda one: _number(one.gradient_error))
    return {
        "layer": layer or "(root)",
        "by": first.key,
        "introduced": first.introduced,
        "precision": first.precision,
        "reason": first.reason,
        "where": first.where,
        "operations": len(found),
        "error": worst.error,
        "autocast": worst.autocast,
        "fp32": worst.fp32,
        "gradient_error": steep.gradient_error,
        "gradient_autocast": steep.gradient_autocast,
        "gradient_fp32": steep.gradient_fp32,
    }


def _number(found: float | None) -> float:
    return -1.0 if found is None else found


def _cell(found: Any) -> str:
    return "-" if found is None else f"{found:.1e}" if isinstance(found, float) else str(found)
