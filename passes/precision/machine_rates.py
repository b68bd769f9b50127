"""Rates of a machine, as data (FLOP/s, bytes/s, seconds per call): the cost model computes a plan's time from them.

Before: "a matmul is faster in bf16". After: ``machine.rates["matmul"]["bfloat16"]``, 1.8e11 FLOP/s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from amp_graph.lists import ListError
from amp_graph.lists.load import FOLDER
from amp_graph.lists.read_toml import (
    FLAG,
    TABLE,
    TEXT,
    Lines,
    Takes,
    check_table,
    one_of,
    read_text,
    read_toml,
)
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16

MACHINES = FOLDER / "machines"
VARIABLE = "AMP_GRAPH_MACHINE"  # the path of a machine file; "default" for the built-in ones
FAMILIES = ("matmul", "matvec", "convolution", "attention", "elementwise", "activation", "normalization", "cast")
COUNTED = ("matmul", "convolution", "attention")  # rates in FLOP/s
DTYPES = ("float32", "bfloat16", "float16")
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
BY_LIBRARY = ("matmul", "convolution")  # run by oneDNN, cuBLAS or cuDNN: these calls cost `product_call` more
# Operations of ATen by family; what is in none of them is elementwise.
PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "lstm", "gru"})
ACTIVATIONS = frozenset({
    "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "sqrt", "gelu", "silu", "elu",
    "selu", "celu", "mish", "hardswish", "softplus", "log_sigmoid", "glu", "erf", "log", "log1p", "sin", "cos", "pow",
    "rsqrt", "logsumexp", "cross_entropy_loss", "nll_loss", "expm1",
})  # fmt: skip
PRODUCT_CALL = "product_call"
LEAST, MOST = 1e-30, 1e30  # bounds of seconds and rates, so that the arithmetic of the planners stays finite


def _is_rate(found: Any) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and LEAST < found < MOST


RATE: Takes = (_is_rate, f"a number above 0, from {LEAST:g} to {MOST:g}")
HEAD = {
    "name": TEXT, "device": one_of("cpu", "cuda"), "description": TEXT, "call": RATE, "graph": RATE, "kept": RATE,
    "promotes_by_copy": FLAG,
}  # fmt: skip
_NUMBERS = ("call", "graph", "kept")
_FIX = "amp-graph calibrate writes a whole file"


@dataclass(frozen=True)
class Machine:
    """The rates of one class of machines: of one core of a CPU, or of a whole GPU.

    ``call``: seconds of overhead per call. ``graph``: seconds of overhead per call of a converted model, in addition
    to its operations. ``product_call``: additional seconds per matmul or convolution call, by dtype: the library looks
    up a kernel and prepares layouts.
    ``kept``: bytes per second for values saved for backward.
    ``promotes_by_copy``: mixed operands are promoted by a copy of the lower one, not in registers.
    ``rates``: by family and dtype; FLOP/s for the families in ``COUNTED``, else bytes/s read and written. "matvec" is
    the rate of a matmul with few rows. A "cast" is between float32 and the dtype under which it is listed.
    ``keeps_weights``: a property of the plan, not of the machine: no gradients; weights are cast and packed once.
    """

    name: str
    device: str
    description: str
    call: float
    graph: float
    kept: float
    promotes_by_copy: bool
    product_call: Mapping[str, float]
    rates: Mapping[str, Mapping[str, float]]
    keeps_weights: bool = False


def is_faster_in(machine: Machine, dtype: str) -> bool:
    """Return whether ``machine`` has arithmetic in ``dtype``: any product is faster than in float32."""
    return any(machine.rates[family][dtype] > machine.rates[family]["float32"] for family in COUNTED)


def machine_for(device: str) -> Machine:
    """Return the machine to plan for on ``device`` ("cpu", "cuda"): the calibrated one if its file exists.

    Raises ListError if the file is not a valid machine file.
    """
    own = own_file()
    if own is not None:
        found = _read(own, own.stat().st_mtime_ns if own.exists() else 0)  # gone: reading it says so
        if found.device == device:
            return found
    return class_of(device)


def own_file() -> Path | None:
    """Return the calibrated file that plans read, if there is one."""
    given = os.environ.get(VARIABLE, "")
    if given == "default":
        return None
    try:
        path = Path(given) if given else place_of_own_file()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, or of a user without a home
        is_file = False
    if given and not is_file:
        raise ListError(f"{VARIABLE} names no file: {given[:500]}", legal="a machine file, or default", fix=_FIX)
    return path if is_file else None


def place_of_own_file() -> Path:
    """Return the path that ``amp-graph calibrate`` writes by default."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "amp_graph" / "machine.toml"


def class_of(device: str) -> Machine:
    """Return the built-in machine that is closest to ``device`` of this host."""
    cpu = "cpu_amx" if cpu_has_amx() else "cpu_bf16" if cpu_has_bf16() else "cpu"
    return _read(MACHINES / f"{cpu if device == 'cpu' else 'cuda'}.toml", 0)


@lru_cache(maxsize=16)
def _read(path: Path, mtime: int) -> Machine:
    return read_machine(read_text(path, _FIX), str(path))


def read_machine(text: str, where: str) -> Machine:
    """Parse a machine from TOML text. Every rate is required; raises ListError if one is missing or invalid."""
    takes = {"machine": HEAD, **dict.fromkeys((PRODUCT_CALL, *FAMILIES), dict.fromkeys(DTYPES, RATE))}
    takes["cast"] = dict.fromkeys(DTYPES[1:], RATE)
    data, at = read_toml(text, where, _FIX), Lines(text, where).at
    check_table(data, dict.fromkeys(takes, TABLE), "the file", at, _FIX, *takes)
    found: dict[str, Any] = {
        name: check_table(data[name], rates, f"[{name}]", partial(at, name, 0), _FIX, *rates)
        for name, rates in takes.items()
    }
    return Machine(**found.pop("machine"), product_call=found.pop(PRODUCT_CALL), rates=found)


def machine_text(machine: Machine) -> str:
    """Return the TOML text of ``machine``, which ``read_machine`` parses."""
    lines = ["[machine]", f"name = {json.dumps(machine.name)}", f"device = {json.dumps(machine.device)}"]
    lines += [f"description = {json.dumps(machine.description)}"]
    lines += [f"{name} = {getattr(machine, name):.3e}" for name in _NUMBERS]
    lines.append(f"promotes_by_copy = {str(machine.promotes_by_copy).lower()}")
    for family, numbers in {PRODUCT_CALL: machine.product_call, **machine.rates}.items():
        lines += ["", f"[{family}]"]
        lines += [f"{dtype} = {number:.3e}" for dtype, number in numbers.items()]
    return "\n".join(lines) + "\n"
