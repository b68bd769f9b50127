"""The file of a calibration: JSON with a schema and a version. Whatever is in a file, a CalibrationError says so.

Before: ``Calibration``. After: ``{"schema": "amp_graph.calibration", "version": 1, "values": {...}, ...}``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from amp_graph.lists.errors import AmpGraphError, shortened
from amp_graph.passes.calibration.ranges import DTYPES, LIMITS, Peak, Range
from amp_graph.passes.native.output_file import write_or_refuse


class CalibrationError(AmpGraphError, ValueError):
    """A calibration that cannot be measured, merged, read or written."""


SCHEMA, VERSION = "amp_graph.calibration", 1
LARGEST = 1 << 28  # bytes of a file
MOST = 1 << 62  # of a count, so that sums of many files stay integers of 64 bits
LOWEST, HIGHEST = -126, 127  # exponents of normal float32 numbers
LONGEST = 10_000  # characters of a name
FIX = "amp_graph.calibrate(model, batches).save('run.json')"


@dataclass(frozen=True)
class NodeRange:
    """What was measured of one operation.

    ``value``: the range of its result. ``reads``: the peak of the values that it reads. ``gradient``: the range of the
    result's gradient. ``gives``: the peak of the gradients that its backward returns. Both None if no gradient reached
    it. ``depth``: how many elements it adds up for one element of its result; 1 for elementwise operations.
    ``free``: whether the lists let it run in low precision.
    """

    value: Range
    reads: Peak | None = None
    gradient: Range | None = None
    gives: Peak | None = None
    depth: int = 1
    free: bool = True

    def __add__(self, other: NodeRange) -> NodeRange:
        """Return the ranges over the batches of both."""
        return NodeRange(
            self.value + other.value,
            _sum(self.reads, other.reads),
            _sum(self.gradient, other.gradient),
            _sum(self.gives, other.gives),
            max(self.depth, other.depth),
            self.free or other.free,
        )


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


# -- writing ------------------------------------------------------------------------------------------------


def to_json(values: Mapping[str, NodeRange], model: str, policy: str, batches: int, gradients: bool) -> dict[str, Any]:
    """Return the content of a file."""
    head = {"schema": SCHEMA, "version": VERSION, "model": model, "policy": policy}
    told = {key: _node_dict(one) for key, one in values.items()}
    return {**head, "batches": batches, "gradients": gradients, "values": told}


def _node_dict(one: NodeRange) -> dict[str, Any]:
    found: dict[str, Any] = {"depth": one.depth, "free": one.free, "value": _range_dict(one.value)}
    found |= {"reads": _peak_dict(one.reads)} if one.reads is not None else {}
    found |= {"gradient": _range_dict(one.gradient)} if one.gradient is not None else {}
    return found | ({"gives": _peak_dict(one.gives)} if one.gives is not None else {})


def _peak_dict(peak: Peak) -> dict[str, Any]:
    mask = {"mask": peak.mask} if peak.mask else {}
    return {"max": peak.largest, "batches": peak.batches, "over": dict(peak.over), **mask}


def _range_dict(found: Range) -> dict[str, Any]:
    numbers = {"elements": found.elements, "zeros": found.zeros, "masked": found.masked}
    counts = {str(e): n for e, n in found.exponents.items()}
    return {**_peak_dict(found.peak), "least": found.least, **numbers, "exponents": counts}


def write_file(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write the file, as a whole or not at all. Raises CalibrationError."""
    text = json.dumps(content, indent=1) + "\n"
    write_or_refuse(path, text, "calibration", "calibration.save('run.json')", CalibrationError)


# -- reading ------------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a file. Raises CalibrationError if it cannot be read."""
    if not isinstance(path, (str, bytes, os.PathLike)):  # a number would be a file descriptor
        raise CalibrationError(f"calibration: {shortened(path)} is not the path of a file\n  fix:   {FIX}")
    try:
        with open(path, "rb") as opened:
            content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CalibrationError(f"{shortened(os.fspath(path))}: more than {LARGEST} bytes\n  fix:   {FIX}")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(os.fspath(path), f"not UTF-8: {error.reason}", "a JSON file that amp_graph.calibrate made", error)
    except (OSError, ValueError) as error:
        if isinstance(error, CalibrationError):
            raise
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        _refuse(os.fspath(path), what, "a file that may be read", error)


def from_json(text: str, where: str) -> dict[str, Any]:
    """Return the fields of the calibration in ``text``. Raises CalibrationError if it is none."""
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        _refuse(where, "nested too deeply", "a JSON file that amp_graph.calibrate made", error)
    except ValueError as error:  # json.JSONDecodeError, and numbers of thousands of digits
        _refuse(where, f"not JSON: {str(error)[:300]}", "a JSON file that amp_graph.calibrate made", error)
    return _Reader(where).calibration(data)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _refuse(where: str, what: str, legal: str, cause: BaseException | None = None) -> NoReturn:
    raise CalibrationError(f"{where[:500]}: {what}\n  legal: {legal}\n  fix:   {FIX}") from cause


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of a file; each method raises CalibrationError with the place of what is wrong."""

    where: str

    def calibration(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else data
            _refuse(self.where, f"no calibration: schema {shortened(found)}", f'"schema": "{SCHEMA}"')
        if type(data.get("version")) is not int or data["version"] != VERSION:
            what = f"version {shortened(data.get('version'))} of the file"
            _refuse(self.where, what, f"version {VERSION}, which this amp_graph reads")
        self.keys(data, ("schema", "version", "model", "policy", "batches", "gradients", "values"), (), "the file")
        nodes = data["values"]
        if not isinstance(nodes, dict):
            self.wrong("values", nodes, "an object of operations")
        return {
            "model": self.name(data["model"], "model"),
            "policy": self.name(data["policy"], "policy"),
            "batches": self.count(data["batches"], "batches"),
            "gradients": self.flag(data["gradients"], "gradients"),
            "values": {self.name(key, "an operation"): self.node(one, shortened(key)) for key, one in nodes.items()},
        }

    def node(self, data: Any, at: str) -> NodeRange:
        self.keys(data, ("depth", "free", "value"), ("reads", "gradient", "gives"), at)
        return NodeRange(
            self.range(data["value"], f"value of {at}"),
            self.peak(data["reads"], f"reads of {at}") if "reads" in data else None,
            self.range(data["gradient"], f"gradient of {at}") if "gradient" in data else None,
            self.peak(data["gives"], f"gives of {at}") if "gives" in data else None,
            self.count(data["depth"], f"depth of {at}"),
            self.flag(data["free"], f"free of {at}"),
        )

    def range(self, data: Any, at: str) -> Range:
        peak = self.peak(data, at, ("least", "elements", "zeros", "masked", "exponents"))
        elements, zeros, masked = (self.count(data[n], f"{n} in the {at}") for n in ("elements", "zeros", "masked"))
        counts = self.exponents(data["exponents"], at)
        if elements != zeros + sum(counts.values()):
            self.wrong(f"elements in the {at}", elements, "the sum of zeros and of the counts in exponents")
        return Range(peak, self.size(data["least"], f"least in the {at}"), elements, zeros, masked, counts)

    def peak(self, data: Any, at: str, more: tuple[str, ...] = ()) -> Peak:
        self.keys(data, ("max", "batches", "over", *more), ("mask",), at)
        self.keys(data["over"], DTYPES, (), f"over in the {at}")
        largest, batches = self.size(data["max"], f"max in the {at}"), self.count(data["batches"], f"batches, {at}")
        over = {name: self.count(data["over"][name], f"over in the {at}") for name in DTYPES}
        for name, found in over.items():
            if found > batches or bool(found) != (largest > LIMITS[name]):
                self.wrong(f"over.{name} in the {at}", found, "the number of batches in which max is out of range")
        return Peak(largest, batches, over, self.size(data.get("mask", 0.0), f"mask in the {at}"))

    def exponents(self, data: Any, at: str) -> dict[int, int]:
        if not isinstance(data, dict):
            self.wrong(f"exponents in the {at}", data, "an object of counts")
        legal = {str(e): e for e in range(LOWEST, HIGHEST + 1)}
        for key in data:
            if key not in legal:
                self.wrong(f"exponents in the {at}", key, f"keys from {LOWEST} to {HIGHEST}")
        return {legal[key]: self.count(n, f"exponents in the {at}") for key, n in data.items()}

    # -- parts ------------------------------------------------------------------------------------------

    def keys(self, data: Any, required: tuple[str, ...], more: tuple[str, ...], at: str) -> None:
        if not isinstance(data, dict) or not {*required} <= {*data} <= {*required, *more}:
            found = sorted(data) if isinstance(data, dict) else data
            self.wrong(at, found, f"an object with {', '.join(required)}" + (f"; also {', '.join(more)}" * bool(more)))

    def name(self, found: Any, at: str) -> str:
        if not isinstance(found, str) or len(found) > LONGEST:
            self.wrong(at, found, f"a text of at most {LONGEST} characters")
        return str(found)

    def count(self, found: Any, at: str) -> int:
        if type(found) is not int or not 0 <= found < MOST:
            self.wrong(at, found, "a whole number from 0")
        return int(found)

    def size(self, found: Any, at: str) -> float:
        if type(found) not in (int, float) or not 0 <= found < 4e38 or not math.isfinite(found):
            self.wrong(at, found, "a magnitude of float32")
        return float(found)

    def flag(self, found: Any, at: str) -> bool:
        if not isinstance(found, bool):
            self.wrong(at, found, "true, false")
        return bool(found)

    def wrong(self, at: str, found: Any, legal: str) -> NoReturn:
        _refuse(self.where, f"{at}: {shortened(found)}", legal)
