"""The file of a calibration: JSON with a schema and a version. Whatever is in a file, a CalibrationError says so.

Before: ``Calibration``. After: ``{"schema": "amp_graph.calibration", "version": 1, "values": {...}, ...}``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, NoReturn

from amp_graph.lists.errors import AmpGraphError, shortened
from amp_graph.passes.calibration.ranges import DTYPES, Range


class CalibrationError(AmpGraphError, ValueError):
    """A calibration that cannot be measured, merged, read or written."""


SCHEMA, VERSION = "amp_graph.calibration", 1
LARGEST = 1 << 28  # bytes of a file
MOST = 1 << 62  # of a count, so that sums of many files stay integers of 64 bits
FIX = "amp_graph.calibrate(model, batches).save('run.json')"
PARTS = ("value", "reads", "gradient", "gives")
WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError)  # what reading a part raises that is wrong


@dataclass(frozen=True)
class NodeRange:
    """What was measured of one operation.

    ``value``: the range of its result. ``reads``: the peak of the values that it reads. ``gradient``: the range of the
    result's gradient. ``gives``: the peak of the gradients that its backward returns. Both None if no gradient reached
    it. ``free``: whether the lists let it run in low precision.
    """

    value: Range
    reads: Range | None = None
    gradient: Range | None = None
    gives: Range | None = None
    free: bool = True

    def __add__(self, other: NodeRange) -> NodeRange:
        """Return the ranges over the batches of both."""
        parts = {name: _sum(getattr(self, name), getattr(other, name)) for name in PARTS}
        return NodeRange(**parts, free=self.free or other.free)


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


# -- writing ------------------------------------------------------------------------------------------------


def to_json(one: NodeRange) -> dict[str, Any]:
    """Return what a file has for an operation."""
    parts = {name: getattr(one, name) for name in PARTS}
    return {"free": one.free, **{name: _range_dict(part) for name, part in parts.items() if part is not None}}


def _range_dict(found: Range) -> dict[str, Any]:
    peak = {"max": found.largest, "batches": found.batches, "over": dict(found.over), "mask": found.mask}
    numbers: dict[str, Any] = {
        "least": found.least,
        "elements": found.elements,
        "zeros": found.zeros,
        "masked": found.masked,
    }
    numbers["exponents"] = {str(e): n for e, n in found.exponents.items()}
    return peak | numbers if found.elements or found.masked else peak


# -- reading ------------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a file. Raises CalibrationError if it cannot be read."""
    if not isinstance(path, (str, bytes, os.PathLike)):  # a number would be a file descriptor
        raise CalibrationError(f"calibration: {shortened(path)} is not the path of a file\n  fix:   {FIX}")
    try:
        with open(path, "rb") as opened:
            content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:  # a device such as /dev/zero never ends
            raise ValueError(f"more than {LARGEST} bytes")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        _refuse(os.fspath(path), what, "a JSON file that amp_graph.calibrate made", error)


def from_json(text: str, where: str) -> dict[str, Any]:
    """Return the fields of the calibration in ``text``. Raises CalibrationError if it is none."""
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"not JSON: {str(error)[:300]}", "a JSON file that amp_graph.calibrate made", error)
    schema = data.get("schema") if isinstance(data, dict) else data
    if schema != SCHEMA:
        _refuse(where, f"no calibration: schema {shortened(schema)}", f'"schema": "{SCHEMA}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        what = f"version {shortened(data.get('version'))} of the file"
        _refuse(where, what, f"version {VERSION}, which this amp_graph reads")
    at = "the file"
    try:
        head = {"model": _typed(data["model"], str), "policy": _typed(data["policy"], str)}
        head |= {"batches": _count(data["batches"]), "gradients": _typed(data["gradients"], bool)}
        values = {}
        for key, one in data["values"].items():
            at = shortened(key)
            values[key] = _node(one)
    except WRONG as error:
        _refuse(where, f"{at}: {type(error).__name__}: {shortened(str(error))}", "what a calibration writes", error)
    return {**head, "values": values}


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _refuse(where: str, what: str, legal: str, cause: BaseException | None = None) -> NoReturn:
    raise CalibrationError(f"{where[:500]}: {what}\n  legal: {legal}\n  fix:   {FIX}") from cause


def _node(data: Any) -> NodeRange:
    parts = {name: _range(data[name]) for name in PARTS if name == "value" or name in data}
    return NodeRange(**parts, free=_typed(data["free"], bool))


def _range(data: Any) -> Range:
    over = {name: _count(data["over"][name]) for name in DTYPES}
    sizes: dict[str, Any] = {name: _size(data.get(name, 0.0)) for name in ("mask", "least")}
    counts = {name: _count(data.get(name, 0)) for name in ("elements", "zeros", "masked")}
    exponents = {int(e): _count(n) for e, n in data.get("exponents", {}).items()}
    return Range(_size(data["max"]), _count(data["batches"]), over, **sizes, **counts, exponents=exponents)


def _typed(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise TypeError(f"{shortened(found)} is no {kind.__name__}")
    return found


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < MOST:
        raise ValueError(f"{shortened(found)} is no whole number from 0")
    return found


def _size(found: Any) -> float:
    if type(found) not in (int, float) or not 0 <= found < 4e38:
        raise ValueError(f"{shortened(found)} is no magnitude of float32")
    return float(found)
