"""AMP8xx: operators and functions of one's own whose dtypes no rule chose, and low products that fell back.

Before: ``mylib::attend`` under autocast, with queries in bfloat16 and a bias in float32. After: AMP801 at its line, and
``torch.library.register_autocast`` as the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from amp_graph.audit.codes import finding
from amp_graph.audit.records import (
    CONVERSION,
    LOW,
    Call,
    Finding,
    Place,
    Tally,
    Watcher,
    dtype_name,
    tensors_in,
)
from amp_graph.audit.speed.predicted_time import is_product
from amp_graph.passes.torch_compat.dispatch import OpOverload, dispatch_has_kernel
from amp_graph.passes.torch_compat.storage import Memory

# Namespaces of torch's own packages, whose operators have rules where they need some.
KNOWN = frozenset({
    "aten", "prim", "prims", "rngprims", "quantized", "quantized_decomposed", "mkldnn", "onednn", "c10d",
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem", "inductor", "profiler", "streams",
    "torchvision", "torchaudio", "amp_graph",
})  # fmt: skip
AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
MOST_UNPACKED = 2  # values of four bits in a byte
QUANTIZED = ("int8", "uint8")
OWN = ("torch", "amp_graph")  # packages whose functions are not the user's
TEXTS = {
    "AMP801": (
        "{name} got {dtypes} under autocast, and has no rule there",
        "torch.library.register_autocast({name!r}, {device!r}, dtype): autocast then casts all its inputs",
    ),
    "AMP802": (
        "{name} ran in {dtypes}, as what came before it did, and has no rule under autocast",
        "torch.library.register_autocast({name!r}, {device!r}, dtype) says in which dtype it is to run",
    ),
    "AMP803": (
        "{name} has a rule under autocast for {other} alone; on {device} it got {dtypes}",
        "torch.library.register_autocast({name!r}, {missing!r}, dtype), as for {there}",
    ),
    "AMP804": (
        "{name} got {dtypes} under autocast, and its forward has no custom_fwd: its backward runs outside of autocast "
        "on what it saved",
        "@torch.amp.custom_fwd(device_type={device!r}, cast_inputs=dtype) on forward, and custom_bwd on backward",
    ),
    "AMP805": (
        "{name} ran in {dtypes} on a value that is held in {other}: it was cast up before",
        "a kernel that takes {other} (torch._scaled_mm, torchao's tensors), or hold it in the dtype of the product",
    ),
}


Use = tuple[Tally, str, dict[str, str]]  # the calls of one operator at one line with a fault, its level, and in words


@dataclass(eq=False)
class CustomOperators(Watcher):
    """Looks at operators outside of ATen, at autograd functions in Python, and at what quantized values become."""

    uses: dict[tuple[str, Place, str], Use] = field(default_factory=dict)
    _context: int = 0  # the id of the last autograd function's
    _up: Memory[str] = field(default_factory=Memory)  # the dtype from which a value was cast up, in this step

    def began(self) -> None:
        """Forget what was cast up."""
        self._up.clear()

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at one operation of the forward."""
        if call.phase != "forward":
            return
        self._follow(call, (args, kwargs), result)
        region = self.training.regions[call.region] if call.region >= 0 else None
        if region is None or not region.enabled:
            return
        self._in_function(call, sys._getframe(1), region.device)
        if isinstance(operator, OpOverload) and operator.namespace not in KNOWN and call.inputs:
            self._own_operator(call, operator, region.device)

    def findings(self) -> Iterator[Finding]:
        """Yield what was found."""
        for (code, place, name), (use, level, values) in self.uses.items():
            what, fix = (text.format(name=name, **values) for text in TEXTS[code])
            calls = use.counts["calls"]
            yield finding(
                code, place, f"{what} (calls a step: {calls / self.training.looks:g})", fix,
                level=level, also=sorted(filter(None, use.modules)), calls=calls, name=name, **values,
            )  # fmt: skip

    def _use(self, code: str, place: Place, name: str, call: Call, level: str, **values: str) -> None:
        self.uses.setdefault((code, place, name), (Tally(call), level, values))[0].add(call, calls=1)

    # -- operators ------------------------------------------------------------------------------------

    def _own_operator(self, call: Call, operator: OpOverload, device: str) -> None:
        name, dtypes = str(operator._schema.name), dict.fromkeys(call.inputs)
        ruled = [one for one, key in AUTOCAST.items() if dispatch_has_kernel(operator, key)]
        values = {"dtypes": " and ".join(dtypes), "device": device}
        is_low = not dtypes.keys().isdisjoint(LOW)
        if len(ruled) == 1:
            missing = next(one for one in AUTOCAST if one not in ruled)
            there = missing.upper(), "CompositeExplicitAutograd"
            if device == missing or any(dispatch_has_kernel(operator, key) for key in there):
                level = "warning" if device == missing and is_low else "note"
                self._use(
                    "AMP803", call.place, name, call, level, **values, other=ruled[0], there=ruled[0], missing=missing
                )
        elif not ruled and is_low:
            code, level = ("AMP801", "warning") if len(dtypes) > 1 else ("AMP802", "note")
            self._use(code, call.place, name, call, level, **values)

    def _in_function(self, call: Call, frame: FrameType | None, device: str) -> None:
        """Look at the innermost forward of an autograd function in Python that is running."""
        while frame is not None:
            code = frame.f_code
            may_be = code.co_name == "forward" and code.co_argcount > 1 and code.co_varnames[0] != "self"
            is_users = frame.f_globals.get("__name__", "").partition(".")[0] not in OWN
            # Its locals are read then, which takes time.
            if may_be and is_users and isinstance(context := frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
                break
            frame = frame.f_back
        if frame is None or frame.f_back is None or frame.f_back.f_globals.get("__name__") == "torch.amp.autocast_mode":
            return
        given = [frame.f_locals.get(one) for one in frame.f_code.co_varnames[1 : frame.f_code.co_argcount]]
        dtypes = dict.fromkeys(dtype_name(t.dtype) for t in tensors_in(given) if t.is_floating_point())
        if len(dtypes) > 1 and not dtypes.keys().isdisjoint(LOW) and self._context != id(context):
            self._context = id(context)
            name = type(context).__name__.removesuffix("Backward")
            values = {"dtypes": " and ".join(dtypes), "device": device}
            self._use("AMP804", self.training.places.of(frame.f_back), name, call, "warning", **values)

    # -- quantized values -----------------------------------------------------------------------------

    def _follow(self, call: Call, given: Any, result: Any) -> None:
        """Follow values from where they are cast up to the product that reads them."""
        tensors = tensors_in(given)
        held, source = next(((held, t) for t in tensors if (held := self._held_in(t))), ("", None))
        if source is None and call.operator == CONVERSION and call.inputs and call.inputs[0].startswith("float8"):
            held, source = call.inputs[0], tensors[0]
        if source is None:
            return
        if is_product(call):
            if "scaled" not in call.operator and not call.inputs[0].startswith("float8"):
                name = call.operator.rpartition(".")[0]
                self._use("AMP805", call.place, name, call, "note", dtypes=call.inputs[0], other=held)
            return
        for t in tensors_in(result):
            if t.numel() <= MOST_UNPACKED * source.numel() and self.training.weights.known(t) is None:
                self._up.keep(t, held)

    def _held_in(self, tensor: Tensor) -> str:
        """Return the dtype in which a quantized value is held that a tensor has; "" of any other."""
        if dtype_name(tensor.dtype) in QUANTIZED and self.training.weights.known(tensor) is not None:
            return dtype_name(tensor.dtype)
        return self._up.known(tensor) or ""
