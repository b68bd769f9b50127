"""The result of ``amp_graph.locate``: what made the first value that is not finite, and what helps.

``print(amp_graph.locate(model, batch, loss_fn))``, ``.text()``, ``.to_dict()``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from amp_graph.passes.calibration.node_keys import few
from amp_graph.passes.graph.graph_text import SHORT


@dataclass(frozen=True)
class Located:
    """Where the first value that is not finite and reaches the loss or a gradient was made.

    kind: "overflow" (fp32 would be finite), "not finite in fp32" (the same operation, or the whole step in fp32, is
    not finite either), "given" (an input, target, parameter or buffer), "unknown" (made by something that was not
    watched), "nothing". direction: "forward" or "backward".
    node, operation, operator: the graph's node, what the user calls, the ATen operator. cast_of: for a cast, what
    computed its value. module: path of the module. line: the user's line, ``file.py:12, in forward: x = self.fc(x)``.
    given: the name of what was given. dtype, result: of the value ("f16"; "inf" or "nan"); limit: the largest number
    of that dtype. operands: (dtype, shape, largest magnitude) each. in_fp32: the largest magnitude of the same
    operation on the same operands in fp32; None if it was not rerun.
    scale: the loss scale of the run; lower_scale: the largest power of two, 1 or more, at which a scaled gradient would
    fit. reached: where the value arrives. fp32_line: where a run in fp32 is not finite.
    fix: what helps, best first. how: what was run. keep: the module that a policy keeps in fp32, and the operation, for
    one in no submodule.
    """

    kind: str = "nothing"
    direction: str = ""
    node: str = ""
    operation: str = ""
    operator: str = ""
    cast_of: str = ""
    module: str = ""
    line: str = ""
    given: str = ""
    dtype: str = ""
    result: str = ""
    limit: float | None = None
    operands: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    in_fp32: float | None = None
    scale: float = 1.0
    lower_scale: float | None = None
    reached: tuple[str, ...] = ()
    fp32_line: str = ""
    fix: tuple[str, ...] = ()
    policy: str = ""
    how: str = ""
    keep: tuple[str, str] = ("", "")

    @property
    def found(self) -> bool:
        """Whether there is a value that is not finite."""
        return self.kind != "nothing"

    def __bool__(self) -> bool:
        """Return whether there is a value that is not finite."""
        return self.found

    @property
    def is_finite_in_fp32(self) -> bool:
        """Whether the same operation was finite in fp32."""
        return self.in_fp32 is not None and math.isfinite(self.in_fp32)

    @property
    def cause(self) -> str:
        """One line: ``backward of linear in blocks.1.fc (model.py:12): 1.3e+05 in fp32``; "" for nothing."""
        if not self.found:
            return ""
        if self.given:
            return f"{self.given} is {self.result}"
        where = f" in {self.module}" if self.module else ""
        place = f" ({self.line.split(', ')[0]})" if self.line else ""
        what = f"{'backward of ' * (self.direction == 'backward')}{self._what()}"
        return f"{what}{where}{place}: {self._result_in_fp32()}"

    def text(self) -> str:
        """Return the result as text, one fact a line."""
        head = f"policy {self.policy}, {self.how}"
        if not self.found:
            return f"nothing found: loss and gradients are finite at scale {self.scale:g} ({head})\n"
        lines = [f"{self._headline()} ({head})"]
        facts = [
            ("module", self.module),
            ("line", self.line),
            ("node", f"{self.node}: {self.operator}, {self.dtype}" if self.operator else ""),
            ("operands", "; ".join(f"{d}{list(s)} up to {x:.3g}" for d, s, x in self.operands)),
            ("result", self._result_in_fp32() if not self.given else ""),
            ("scale", f"{self.scale:g}"),
            ("reached", few([*self.reached])),
            ("in fp32", f"not finite either, first at {self.fp32_line}" if self.fp32_line else ""),
            *(("fix" if i == 0 else "or", fix) for i, fix in enumerate(self.fix)),
        ]
        return "\n".join([*lines, *(f"  {name:<9} {told}" for name, told in facts if told)]) + "\n"

    def _headline(self) -> str:
        if self.given:
            return f"{self.given} is not finite: it has {self.result}"
        if self.kind == "unknown":
            return f"a value that is not finite reaches {few([*self.reached])}; no watched operation made it"
        return f"{self.kind} in {self.direction}: {self._what()} made {self.result} of finite operands"

    def _what(self) -> str:
        call = self.operation or self.operator
        return f"the cast of {self.cast_of} to {self.dtype}" if self.cast_of else call

    def _result_in_fp32(self) -> str:
        if self.in_fp32 is None:
            return self.result
        if not math.isfinite(self.in_fp32):
            return f"{self.result}, in fp32 as well"
        ends = f", {self.dtype} ends at {self.limit:g}" if self.limit is not None else ""
        return f"{self.in_fp32:.3g} in fp32{ends}"

    def __str__(self) -> str:
        """Return the result as text."""
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite as strings, so that any JSON reader takes them."""
        return {"format": 1, "found": self.found, "cause": self.cause, **plain_values(dataclasses.asdict(self))}


def number_text(number: float) -> str:
    """Return a number that is not finite: "nan" or "inf"."""
    return "nan" if math.isnan(number) else "inf"


def dtype_text(dtype: Any) -> str:
    """Return a dtype's short name: ``f16``."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def plain_values(value: Any) -> Any:
    """Return ``value`` for JSON: tuples as lists, numbers that are not finite as text."""
    if isinstance(value, dict):
        return {str(key): plain_values(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain_values(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
