"""The ranges of a model's values and gradients, measured on batches: what is out of range, and which loss scale fits.

Before: forty batches. After: ``calibration.out_of_range("float16")``, and ``calibration.save("run.json")``.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from amp_graph.lists.errors import shortened
from amp_graph.passes.calibration.calibration_file import (
    SCHEMA,
    VERSION,
    CalibrationError,
    NodeRange,
    from_json,
    read_file,
    to_json,
)
from amp_graph.passes.calibration.node_keys import few
from amp_graph.passes.calibration.ranges import LIMITS, Range
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.passes.native.output_file import write_or_refuse

LARGEST_SCALE = 2.0**24  # a loss scale's default ceiling
CLAMPED = "casts clamp these; lists that reproduce torch.autocast do not, and stay full there"
COLUMNS = ("operation", "max", "min normal", "overflow", "underflow", "max gradient", "loss scale")


@dataclass(frozen=True)
class ScaleAdvice:
    """A loss scale for a dtype.

    ``scale``: the largest power of two with which no gradient overflows, but for those that overflow unscaled and so
    stay in fp32. ``underflow``: the share of their nonzero elements that it still makes 0.
    """

    scale: float
    underflow: float


@dataclass(frozen=True)
class Calibration:
    """Ranges by operation (``layers.3.fc:linear``), as ``amp_graph.calibrate`` measures them in float32.

    values: the ranges, by operation. model: the class name of the model. policy: what it was planned for. batches:
    their number, over all runs and processes. gradients: whether backward was measured as well. where: the file that it
    was read from.
    """

    values: Mapping[str, NodeRange]
    model: str = ""
    policy: str = ""
    batches: int = 0
    gradients: bool = False
    where: str = field(default="", compare=False)

    # -- files ------------------------------------------------------------------------------------------

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read ``path``, a file of ``save``. Raises CalibrationError if it cannot be read, or is no calibration."""
        return Calibration(**from_json(read_file(path), os.fspath(path)), where=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` as JSON, as a whole or not at all. Raises CalibrationError if it cannot be written."""
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        write_or_refuse(path, text, "calibration", "calibration.save('run.json')", CalibrationError)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file: ``schema``, ``version``, and plain values."""
        head = {"schema": SCHEMA, "version": VERSION, "model": self.model, "policy": self.policy}
        values = {key: to_json(one) for key, one in self.values.items()}
        return {**head, "batches": self.batches, "gradients": self.gradients, "values": values}

    def merge(self, *others: Calibration) -> Calibration:
        """Return the calibration of the batches of this and of ``others``, such as those of several processes.

        Raises CalibrationError if two of them are of different models.
        """
        return functools.reduce(_merged, others, self)

    # -- what follows -----------------------------------------------------------------------------------

    def loss_scale(self, dtype: str = "float16") -> ScaleAdvice:
        """Return the loss scale for ``dtype``, and how much underflows with it; 1 without measured gradients."""
        return advice(self.values, _known(dtype))

    def out_of_range(self, dtype: str = "float16") -> dict[str, str]:
        """Return the operations that ``dtype`` cannot hold, with the reason: "max 1.2e5 > 65504 in 3 of 40 batches".

        An operation is out of range if its value, a value that it reads, or a gradient of either is.
        """
        name = _known(dtype)
        return {key: why for key, one in self.values.items() if (why := _reason(one, name))}

    def masks(self, dtype: str = "float16") -> dict[str, str]:
        """Return the operations that hold or read numbers of a mask, finite in float32 and not in ``dtype``."""
        limit, found = LIMITS[_known(dtype)], {}
        for name, one in self.values.items():
            mask = max(peak.mask for peak in (one.value, one.reads) if peak is not None)
            if mask > limit:
                found[name] = f"a mask: {number(-mask)} < {number(-limit)}"
        return found

    def rows(self, dtype: str = "float16") -> list[dict[str, Any]]:
        """Return a row per operation, largest value first: range, shares out of ``dtype``, its own loss scale."""
        limit, out = LIMITS[_known(dtype)], self.out_of_range(dtype)
        found = []
        for name, one in sorted(self.values.items(), key=lambda item: -item[1].value.largest):
            gradient = one.gradient.largest if one.gradient else 0.0
            own = _power_below(limit / gradient) if gradient else None
            shares = one.value.fractions(dtype)
            found.append({
                "operation": name, "max": one.value.largest, "min normal": one.value.least, **shares,
                "max gradient": gradient if one.gradient else None, "loss scale": own,
                "kept full": out.get(name, ""),
            })  # fmt: skip
        return found

    def text(self, dtype: str = "float16", most: int = 20) -> str:
        """Return a table of the ``most`` largest values, and the operations that stay full in ``dtype``."""
        rows = self.rows(dtype)
        lines = [COLUMNS, *([_cell(row[name]) for name in COLUMNS] for row in rows[:most])]
        advised = self.loss_scale(dtype)
        said = f"{self.model}: {len(rows)} operations over {self.batches} batches, against {dtype}"
        scale = f"loss scale {advised.scale:g}, with which {advised.underflow:.2%} of nonzero gradients become 0"
        kept = [f"stays full: {name}: {why}" for name, why in self.out_of_range(dtype).items()]
        masks = len(self.masks(dtype))
        kept += [f"{masks} operations hold masks beyond {dtype}: {CLAMPED}"] if masks else []
        return "\n".join([said, scale if self.gradients else "no gradients were measured", *kept, "", *aligned(lines)])


def _known(dtype: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in LIMITS:
        raise CalibrationError(f"calibration: unknown dtype {shortened(dtype)}\n  legal: {', '.join(LIMITS)}")
    return name


def _cell(found: Any) -> str:
    return "-" if found is None else number(found) if isinstance(found, float) else str(found)


def number(found: float) -> str:
    """Format a number shortly: ``1.2e5``, ``65504``, ``0.031``."""
    if found == int(found) and abs(found) < 1e5:
        return str(int(found))
    text = f"{found:.2g}"
    return text.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _merged(a: Calibration, b: Calibration) -> Calibration:
    """Merge two calibrations of one model."""
    if not isinstance(b, Calibration):
        raise CalibrationError(f"merge: a {type(b).__name__} is no Calibration\n  fix:   Calibration.load(path)")
    missing = [key for key in a.values if key not in b.values]
    if a.values and b.values and len(missing) == len(a.values):
        raise CalibrationError(
            f"merge: {a.where or 'one'} is of {a.model}, with {few(list(a.values))}, and {b.where or 'the other'} of "
            f"{b.model}, with {few(list(b.values))}: they have no operation in common\n"
            "  legal: calibrations of one model\n  fix:   merge the files of one model's processes"
        )
    values = {key: one + b.values[key] if key in b.values else one for key, one in a.values.items()}
    values |= {key: one for key, one in b.values.items() if key not in values}
    return replace(a, values=values, batches=a.batches + b.batches, gradients=a.gradients or b.gradients, where="")


def _reason(one: NodeRange, dtype: str) -> str:
    """Return why an operation must stay full; "" if nothing of it is out of range."""
    told = {
        "its value": one.value,
        "what it reads": one.reads,
        "its gradient": one.gradient,
        "the gradient that it returns": one.gives,
    }
    over = ((what, peak) for what, peak in told.items() if peak is not None and peak.over[dtype])
    return next((f"{what}: {_over(peak, dtype)}" for what, peak in over), "")


def _over(peak: Range, dtype: str) -> str:
    return f"max {number(peak.largest)} > {number(LIMITS[dtype])} in {peak.over[dtype]} of {peak.batches} batches"


# -- the loss scale -----------------------------------------------------------------------------------------


def advice(values: Mapping[str, NodeRange], dtype: str) -> ScaleAdvice:
    """Return the largest loss scale with which no gradient overflows that fits unscaled, and what it makes 0."""
    limit = LIMITS[dtype]
    parts = {key: (one.gradient, one.gives) for key, one in values.items() if one.free}
    peaks = {key: max((p.largest for p in given if p is not None), default=0.0) for key, given in parts.items()}
    fits = {key: peak for key, peak in peaks.items() if 0.0 < peak <= limit}
    if not fits:
        return ScaleAdvice(1.0, 0.0)
    scale = min(_power_below(limit / max(fits.values())), LARGEST_SCALE)
    return ScaleAdvice(scale, underflow(values, fits, dtype, scale))


def underflow(values: Mapping[str, NodeRange], keys: Iterable[str], dtype: str, scale: float) -> float:
    """Return the mean share, over operations, of nonzero gradient elements that become 0."""
    found = [g.fractions(dtype, scale)["underflow"] for k in keys if (g := values[k].gradient) is not None]
    return sum(found) / len(found) if found else 0.0


def _power_below(number: float) -> float:
    """Return the largest power of two that is at most ``number``."""
    return 2.0 ** (math.frexp(min(number, 2.0**100))[1] - 1)


BY_NAME = "kept by keep_ops"


def kept_full(
    keys: Mapping[Node, str], calibration: Calibration | None, names: Collection[str], dtype: torch.dtype, clamps: bool
) -> dict[Node, str]:
    """Return the operations that stay full, with reasons; ``names``: the keys that a policy's ``keep_ops`` lists.

    ``clamps``: casts keep the finite numbers of masks finite. Else what holds or reads such a mask stays full too.
    """
    found = {node: f"{BY_NAME} ({key})" for node, key in keys.items() if key in names}
    if calibration is None:
        return found
    name = str(dtype).removeprefix("torch.")
    out = {**({} if clamps else calibration.masks(name)), **calibration.out_of_range(name)}
    where = os.path.basename(calibration.where) or "calibration"
    return {node: f"{where}: {out[key]}" for node, key in keys.items() if key in out} | found


def unmatched(low: Mapping[Node, str], calibration: Calibration) -> tuple[list[Node], str]:
    """Return operations planned low of which ``calibration`` knows nothing, and a warning; ``low``: their keys."""
    nodes = [node for node, key in low.items() if key not in calibration.values]
    if not nodes:
        return [], ""
    return nodes, (
        f"amp_graph: calibration {calibration.where or 'given'}, made of {calibration.model or 'a model'}, does not "
        f"know {len(nodes)} of {len(low)} operations that are planned low: {few([low[node] for node in nodes])}; they "
        "are planned without it\n  fix:   amp_graph.calibrate(model, batches).save(path) on this model, under this "
        "policy, with batches that run all branches"
    )
